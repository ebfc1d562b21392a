// A named launch schedule whose events and answers come from a test:
// tests/reducer/test_launches.py.
//
//   launches NAME BUCKETS    prints what the schedule says of itself, then reads events, a line
//   each,
//                            such as "bucket_ready 3". A call on LaunchControl is a line on stdout,
//                            such as "is_over 3", and the next line of stdin is its answer. After
//                            an event it prints "done".
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "comm/base/error.h"
#include "reducer/launch/launch_schedule.h"

using namespace dpcore;

namespace {

std::vector<size_t> numbers_in(const std::string& line) {
  std::istringstream words(line);
  std::vector<size_t> numbers;
  for (size_t number = 0; words >> number;) {
    numbers.push_back(number);
  }
  return numbers;
}

class AskedControl final : public LaunchControl {
 public:
  using LaunchControl::launch;
  using LaunchControl::update;
  size_t buckets() const override { return number("buckets"); }
  size_t bucket_of(size_t gradient) const override {
    const std::vector<size_t> answer = numbers_in(ask("bucket_of", gradient));
    return answer.empty() ? kNoBucket : answer.front();
  }
  const std::vector<size_t>& gradients_of_module(size_t module) const override {
    gradients_ = numbers_in(ask("gradients_of_module", module));
    return gradients_;
  }
  uint64_t bytes(size_t bucket) const override { return number("bytes", bucket); }
  bool is_complete(size_t bucket) const override { return number("is_complete", bucket) != 0; }
  int rank() const override { return static_cast<int>(number("rank")); }
  int world() const override { return static_cast<int>(number("world")); }
  double elapsed_ms() const override { return static_cast<double>(number("elapsed_ms")); }
  size_t in_flight() const override { return number("in_flight"); }
  std::vector<double> max_over_ranks(std::vector<double>) override {
    throw Error("no schedule of dpcore's own compares ranks");
  }
  void launch(std::span<const size_t> buckets, Launch how) override {
    ask("launch", in_words(buckets), how.priority, how.background);
  }
  const std::vector<uint64_t>& slices(size_t) const override {
    throw Error("no schedule of dpcore's own cuts buckets");
  }
  void launch_slice(size_t, size_t, Launch) override { slices(0); }
  void skip(size_t bucket) override { ask("skip", bucket); }
  void wait(size_t bucket) override { ask("wait", bucket); }
  void wait_for_all() override { ask("wait_for_all"); }
  bool is_over(size_t bucket) const override { return number("is_over", bucket) != 0; }
  void update(std::span<const size_t> buckets) override { ask("update", in_words(buckets)); }
  const std::vector<size_t>& order_of_need() const override {
    const std::vector<size_t> answer = numbers_in(ask("order_of_need"));
    if (answer != needs_) {
      needs_ = answer;  // else a loop over the last answer goes on
    }
    return needs_;
  }
  std::optional<Phase> next_phase(size_t bucket) const override {
    const std::string answer = ask("next_phase", bucket);
    for (const Phase phase :
         {Phase::all_reduce, Phase::reduce_scatter, Phase::update, Phase::all_gather}) {
      if (name_of(phase) == answer) {
        return phase;
      }
    }
    return std::nullopt;
  }

 private:
  static std::string in_words(std::span<const size_t> buckets) {
    std::string words;
    for (const size_t bucket : buckets) {
      words += (words.empty() ? "" : ",") + std::to_string(bucket);
    }
    return words;
  }
  template <class... Arguments>
  static std::string ask(const char* call, const Arguments&... arguments) {
    std::cout << call;
    ((std::cout << ' ' << arguments), ...);
    std::cout << std::endl;
    std::string answer;
    std::getline(std::cin, answer);
    return answer;
  }
  template <class... Arguments>
  static size_t number(const char* call, const Arguments&... arguments) {
    return std::stoul(ask(call, arguments...));
  }

  mutable std::vector<size_t> gradients_;
  mutable std::vector<size_t> needs_;
};

void tell(LaunchSchedule& schedule, const std::string& line, LaunchControl& control) {
  std::istringstream words(line);
  std::string event;
  size_t number = 0;
  words >> event >> number;
  if (event == "bucket_ready") {
    schedule.on_bucket_ready(control, number);
  } else if (event == "backward_end") {
    schedule.on_backward_end(control);
  } else if (event == "optimizer_step") {
    schedule.on_optimizer_step(control);
  } else if (event == "forward_begin") {
    schedule.on_forward_begin(control, number);
  } else {
    throw Error("no event is called " + event);
  }
}

void describe(const LaunchSchedule& schedule, size_t buckets) {
  std::cout << schedule.listens() << ' ' << schedule.is_exact() << ' ' << schedule.whole_buckets();
  for (size_t at = 0; at < schedule.phases().size(); ++at) {
    std::cout << ' ' << name_of(schedule.phases()[at]);
  }
  std::cout << "\ncaps";
  for (const uint64_t cap : schedule.caps({100, 200})) {
    std::cout << ' ' << cap;
  }
  std::cout << "\norder";
  for (const size_t bucket : schedule.order(buckets)) {
    std::cout << ' ' << bucket;
  }
  std::cout << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    return 2;
  }
  const std::shared_ptr<LaunchSchedule> schedule = make_launch_schedule(argv[1]);
  describe(*schedule, std::stoul(argv[2]));
  AskedControl control;
  for (std::string line; std::getline(std::cin, line);) {
    tell(*schedule, line, control);
    std::cout << "done" << std::endl;
  }
}
