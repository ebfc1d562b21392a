// Numbering, pooling, waiting, groups and the end; which algorithm a call runs; and what it is
// refused for.
#include "comm/communicator.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/fnv.h"
#include "comm/base/switch.h"
#include "comm/collective/geometry.h"
#include "comm/operations/collective_operation.h"
#include "comm/schedule/choice.h"

namespace dpcore {
namespace {

constexpr int64_t kClosePatienceNs = 5'000'000'000;
constexpr int64_t kUnwatchedPatienceNs = 60'000'000'000;
constexpr int64_t kReturnPatienceNs = 30'000'000;

constexpr int64_t kSettlePatienceNs = 200'000'000;  // of a communicator that failed

}  // namespace

void Context::keep_until_all_left(std::shared_ptr<Group> group,
                                  std::vector<std::shared_ptr<std::byte>> blocks) {
  const std::lock_guard<std::mutex> lock(mutex_);
  closed_.push_back({std::move(group), std::move(blocks)});
  endpoint_->look_for_deaths();
  std::erase_if(closed_, [](const Closed& entry) { return entry.group->all_peers_left(); });
}

std::shared_ptr<Communicator> Communicator::start(const Options& options) {
  if (options.world < 1 || options.rank < 0 || options.rank >= options.world) {
    throw RendezvousError("rank " + std::to_string(options.rank) + " in a world of " +
                          std::to_string(options.world) + " ranks: rank must be 0.." +
                          std::to_string(options.world - 1));
  }
  if (!(options.timeout_s > 0)) {
    throw Unsupported("timeout " + std::to_string(options.timeout_s) +
                      ": a wait for another rank needs more than 0 seconds");
  }
  check_algorithm_name(options.algorithm);
  Rendezvous rendezvous;
  rendezvous.name = options.job;
  rendezvous.rank = options.rank;
  rendezvous.world = options.world;
  rendezvous.deadline_ns =
      now_ns() + to_ns(options.meets_within_s > 0 ? options.meets_within_s : options.timeout_s);
  rendezvous.interrupted = options.interrupt;
  rendezvous.costs = options.costs;
  auto endpoint = Endpoint::meet(
      options.threads ? RankKind::threads : RankKind::processes, rendezvous, options.tcp.get(),
      Group::control_bytes(options.world), [&](std::byte* control) {
        Group::prepare_control(control, options.rank, options.world,
                               {Endpoint::job_of(options.job), Context::kRootGroup, options.rank});
      });
  std::vector<int> members(options.world);
  std::vector<uint64_t> offsets(options.world);
  for (int r = 0; r < options.world; ++r) {
    members[r] = r;
    offsets[r] = endpoint->root_control_offset_of(r);
  }
  auto remote = Group::meet_remote(*endpoint, members, options.rank, Context::kRootGroup);
  auto group = std::make_shared<Group>(endpoint, std::move(members), options.rank, offsets, nullptr,
                                       std::move(remote));
  return std::shared_ptr<Communicator>(
      new Communicator(options, std::make_shared<Context>(endpoint), std::move(group)));
}

Communicator::Communicator(Options options, std::shared_ptr<Context> context,
                           std::shared_ptr<Group> group)
    : options_(std::move(options)),
      context_(std::move(context)),
      group_(std::move(group)),
      shared_(std::make_shared<SharedState>(group_, options_.link)),
      choice_(hosts_for_costs(), endpoint().costs(), options_.deterministic),
      programs_(rank(), world(), choice_.hosts(), options_.deterministic) {
  if (options_.link) {
    context_->engine().sleep_early();
  }
  if (Network* network = endpoint().network()) {
    network->set_timeout(to_ns(options_.timeout_s));
  }
  options_.interrupt = nullptr;
  if (options_.tcp) {  // shrink() may need it, and listens anew
    options_.tcp = std::make_shared<TcpOptions>(*options_.tcp);
    options_.tcp->listener = nullptr;
  }
  show_memory_in_use();
}

Communicator::~Communicator() {
  close();
  hide_memory_in_use();
}

template <class T>
T& Communicator::from_pool(std::vector<std::shared_ptr<T>>& pool) {
  // From the one that was found last, around; the two pools share the index to begin at.
  size_t at = pool_at_ < pool.size() ? pool_at_ : 0;
  for (size_t i = 0; i < pool.size(); ++i) {
    auto& candidate = pool[at];
    if (candidate.use_count() == 1 &&
        candidate->status.load(std::memory_order_acquire) != Operation::pending) {
      pool_at_ = at;
      return *candidate;
    }
    at = at + 1 < pool.size() ? at + 1 : 0;
  }
  pool.push_back(std::make_shared<T>());
  return *pool.back();
}

void Communicator::make_pending(Operation& operation, double timeout_s) const {
  operation.timeout_s = timeout_s > 0 ? timeout_s : options_.timeout_s;
  const int64_t patience = to_ns(operation.timeout_s);
  operation.deadline_ns = now_roughly_ns() + patience;
  if (Network* network = endpoint().network()) {
    network->set_timeout(patience);
  }
  operation.status.store(Operation::pending, std::memory_order_relaxed);
}

void Communicator::run_by_default(const Schedule& schedule) {
  const std::lock_guard<SpinLock> lock(submission_);
  programs_.use_own(schedule);
}

CollectiveOperation& Communicator::prepare(Request&& request, const std::string& algorithm) {
  choose_algorithm(request, algorithm);
  const double timeout = request.timeout_s;
  CollectiveOperation& operation = from_pool(pool_);
  operation.prepare(shared_, std::move(request), next_number_, &context_->engine().in_flight());
  make_pending(operation, timeout);
  ++next_number_;
  return operation;
}

Work Communicator::begin(Request&& request, const std::string& algorithm, int polls) {
  check(request);
  Engine& engine = context_->engine();
  Operation* operation = nullptr;
  {
    const std::lock_guard<SpinLock> lock(submission_);
    if (engine.in_flight().load(std::memory_order_relaxed) != 0) {
      check_not_in_use(memory_use(request, rank(), world()));
    }
    operation = &prepare(std::move(request), algorithm);
    if (!engine.try_begin_inline()) {
      Work work = operation->shared_from_this();
      engine.submit(work, false);
      return work;
    }
  }
  Work pending;
  if (engine.run_inline(*operation, polls, pending) == Operation::failed) {
    group_->failure().raise();
  }
  return pending;
}

void Communicator::run(Request&& request, const std::string& algorithm,
                       const Engine::Interrupt& interrupt) {
  if (const Work pending = begin(std::move(request), algorithm, Engine::kPollsBeforeSleep)) {
    wait(*pending, 0, interrupt);
  }
}

Work Communicator::submit(Request&& request, const std::string& algorithm, bool background,
                          Work after) {
  check(request);
  if (background) {
    context_->engine().be_ready_for_background();
  }
  const std::lock_guard<SpinLock> lock(submission_);
  if (!after && context_->engine().in_flight().load(std::memory_order_relaxed) != 0) {
    check_not_in_use(memory_use(request, rank(), world()));
  }
  CollectiveOperation& operation = prepare(std::move(request), algorithm);
  operation.follow(std::move(after));
  Work work = operation.shared_from_this();
  context_->engine().submit(work, background);
  return work;
}

MessageOperation& Communicator::prepare_message(const MessageCall& call) {
  if (context_->engine().in_flight().load(std::memory_order_relaxed) != 0) {
    check_not_in_use(memory_use(call.sends, call.data, call.bytes));
  }
  MessageOperation& operation = from_pool(message_pool_);
  operation.prepare(shared_, call);
  make_pending(operation, call.timeout_s);
  return operation;
}

Work Communicator::submit_message(const MessageCall& call) {
  check_message(call);
  context_->engine().be_ready_for_background();
  const std::lock_guard<SpinLock> lock(submission_);
  Work work = prepare_message(call).shared_from_this();
  context_->engine().submit(work, true);
  return work;
}

void Communicator::run_message(const MessageCall& call, const Engine::Interrupt& interrupt) {
  check_message(call);
  Work work;
  {
    const std::lock_guard<SpinLock> lock(submission_);
    work = prepare_message(call).shared_from_this();
    context_->engine().submit(work, false);
  }
  wait(*work, 0, interrupt);
}

void Communicator::wait(Operation& operation, double timeout_s,
                        const Engine::Interrupt& interrupt) {
  if (!operation.is_complete()) {
    check_not_forked();
  }
  TraceRecorder& trace = endpoint().trace();
  const int64_t begin = trace.recording() ? now_ns() : 0;
  // The operation's own deadline is watched by the engine; this one is the caller's.
  const int64_t deadline = timeout_s > 0 ? now_ns() + to_ns(timeout_s) : INT64_MAX;
  try {
    if (!context_->engine().wait(operation, deadline, interrupt)) {
      group_->fail(ErrorKind::timeout, operation.first_late(),
                   operation.describe() + " was not complete " + in_seconds(timeout_s) +
                       " after wait() began; " + operation.describe_late_ranks(),
                   operation.place_in_group());
    }
  } catch (...) {  // Ctrl-C: the operation can't be taken back, so no rank can go on
    group_->give_up("was interrupted during " + operation.describe(), operation.place_in_group());
    context_->engine().drain(*group_, now_ns() + kClosePatienceNs);
    throw;
  }
  if (!operation.is_complete()) {
    context_->engine().drain(*group_, now_ns() + kClosePatienceNs);
  }
  if (begin != 0) {
    trace.add({operation.trace_name(), EventKind::exposed, -1, 0, operation.trace_number(),
               operation.trace_bytes(), begin, now_ns()});
  }
  if (operation.status.load(std::memory_order_acquire) == Operation::failed) {
    group_->failure().raise();
  }
}

// Every rank tells all others its color, key, where its control block lies and how many groups it
// has made; so all members agree on ranks and on the group's name without another word.
std::shared_ptr<Communicator> Communicator::split(int color, int key,
                                                  const Engine::Interrupt& interrupt) {
  check_usable();
  struct Entry {
    int32_t color;
    int32_t key;
    uint32_t groups_made;
    uint64_t offset;
  };
  // No rank knows yet how large its group will be: room for all.
  auto block = endpoint().arena().allocate(Group::control_bytes(world()), 64);
  const Entry own{color, key, context_->next_group(), endpoint().arena().offset_of(block.get(), 1)};
  const std::vector<Entry> entries = hear_all(own, interrupt);

  std::vector<int> ranks;
  for (int r = 0; r < world(); ++r) {
    if (color >= 0 && entries[r].color == color) {
      ranks.push_back(r);
    }
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return entries[a].key < entries[b].key; });
  const int new_world = static_cast<int>(ranks.size());
  const int new_rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin());
  std::vector<int> members(new_world);
  std::vector<uint64_t> offsets(new_world);
  std::unique_ptr<RemoteMembers> remote;
  for (int i = 0; i < new_world; ++i) {
    members[i] = group_->member(ranks[i]);
    offsets[i] = entries[ranks[i]].offset;
  }
  if (new_world > 0) {
    const uint64_t name = Context::group_name(members[0], entries[ranks[0]].groups_made);
    Group::prepare_control(block.get(), new_rank, new_world,
                           {endpoint().job(), name, members[new_rank]});
    remote = Group::meet_remote(endpoint(), members, new_rank, name);
  }
  // A barrier: no rank reads a control block, or sends a frame, before it is prepared.
  run(Request{}, "auto", interrupt);
  if (new_world == 0) {
    return nullptr;
  }
  auto group = std::make_shared<Group>(context_->endpoint_ptr(), std::move(members), new_rank,
                                       offsets, std::move(block), std::move(remote));
  return std::shared_ptr<Communicator>(new Communicator(options_, context_, std::move(group)));
}

void Communicator::show_placement(const std::string& where, int64_t since_ns) {
  if (closed()) {
    return;
  }
  group_->show_placement(where, since_ns, now_ns());
  // A rank that is busy elsewhere still hears what the others say of themselves.
  if (endpoint().network() != nullptr && context_->engine().in_flight() == 0) {
    context_->engine().take_in_control();
  }
}

void Communicator::abort(const std::string& reason) {
  check_not_forked();
  if (closed()) {  // its memory may be another's by now
    return;
  }
  group_->give_up("gave up: " + reason);
  context_->engine().drain(*group_, now_ns() + kClosePatienceNs);
}

void Communicator::close(const Engine::Interrupt& interrupted) {
  if (is_shrunk_.load() || closed_.exchange(true) || endpoint().is_forked_copy()) {
    return;
  }
  const bool others_wait = context_->engine().has_waiter();
  // The wait of a destructor cannot be interrupted.
  const int64_t patience =
      std::min(to_ns(options_.timeout_s), interrupted ? INT64_MAX : kUnwatchedPatienceNs);
  const int64_t deadline_ns = now_ns() + (group_->failed() ? kClosePatienceNs : patience);
  group_->closes_at_ns.store(deadline_ns, std::memory_order_relaxed);
  std::exception_ptr interruption;
  try {  // what is late fails before the end of this
    context_->engine().drain(*group_, deadline_ns + kClosePatienceNs, interrupted);
  } catch (...) {  // Ctrl-C: the rest of the end takes no time any more
    interruption = std::current_exception();
    group_->give_up("was interrupted during close()");
    context_->engine().drain(*group_, now_ns() + kClosePatienceNs);
  }
  Network* network = endpoint().network();
  const auto take_in = [this] { context_->engine().take_in_unexpected(); };
  if (!shared_->unchecked().empty() && !group_->failed()) {
    if (group_->remote() != nullptr) {  // each of two ranks has sent its entry before it reads
      network->settle(now_ns() + kClosePatienceNs, take_in);
      take_in();
    }
    compare_last_calls(*shared_);
  }
  if (others_wait) {
    // At the end of a program: threads that came out of a wait must be back with their callers
    // before the interpreter goes (it ends threads that ask for its lock, and C++ aborts).
    std::this_thread::sleep_for(std::chrono::nanoseconds(kReturnPatienceNs));
  }
  auto blocks = shared_->take_blocks();
  if (auto own = group_->take_own_block()) {
    blocks.push_back(std::move(own));
  }
  if (group_->remote() != nullptr) {
    group_->remote()->give_up();  // what still comes for this group is thrown away
  }
  for (int r = 0; r < world(); ++r) {
    if (group_->is_remote(r)) {
      network->deliver_data(
          group_->remote()->peer_of(r), deadline_ns,
          [&] { return !group_->has_left(r) && !group_->failed(); }, take_in);
    }
  }
  group_->leave();
  if (network != nullptr) {
    network->settle(now_ns() + (group_->failed() ? kSettlePatienceNs : kClosePatienceNs), take_in);
  }
  context_->keep_until_all_left(group_, std::move(blocks));
  if (!first_) {
    let_go_of_before();
  }
  if (const auto first = std::move(first_)) {
    first->is_shrunk_ = false;
    first->close();
  }
  if (interruption) {
    std::rethrow_exception(interruption);
  }
}

// ---- which algorithm an operation runs, and why

namespace {

uint64_t hash_of(const AskedAlgorithm& asked) {
  return Fnv().add(asked.name).add(asked.literal ? 1 : 0).value();
}

}  // namespace

// Where ranks that share memory play at a slow network, each has a NIC of its own.
std::vector<int> Communicator::hosts_for_costs() const {
  std::vector<int> hosts = group_->hosts();
  if (options_.link && group_->remote() == nullptr) {
    std::iota(hosts.begin(), hosts.end(), 0);
  }
  return hosts;
}

// A small operation over TCP needs no messages, unless a link is to hold them back.
void Communicator::choose_by_cost(Request& request) {
  if (goes_by_messages() && (options_.link || !is_small(request, world(), group_->small_bytes()))) {
    const size_t bytes = bytes_of(request, world());
    request.program = programs_.of(choice_.choose(request.collective, bytes, request.ordered),
                                   request.collective, request.root);
    request.algorithm = request.program->hash;  // the choice hangs on options of each rank
  }
}

void Communicator::choose_algorithm(Request& request, const std::string& name) {
  const bool by_messages = goes_by_messages();
  const bool uneven_exchange = announces_parts(request);
  if (uneven_exchange && (request.program || (!name.empty() && name != "auto"))) {
    throw Unsupported("all_to_all with uneven parts has one algorithm; leave algorithm out");
  }
  if (uneven_exchange) {
    if (static_cast<size_t>(world()) * sizeof(uint64_t) > kAnnouncedBytes) {
      throw Unsupported("all_to_all with uneven parts is for at most " +
                        std::to_string(kAnnouncedBytes / sizeof(uint64_t)) + " ranks");
    }
    if (by_messages) {
      request.program = programs_.of("direct", request.collective, request.root);
    }
    return;
  }
  if (name.empty() && !request.program) {
    request.program = programs_.own_for(request.collective, request.root);
  }
  if (request.program) {  // the user's own schedule
    programs_.check_deterministic(request.program->schedule, request.ordered);
    request.algorithm = request.program->hash;
    return;
  }
  if (request.collective == Collective::barrier) {
    return;
  }
  if (name.empty() ? is_open_ : name == "auto") {  // most calls: then no name is looked up
    choose_by_cost(request);
    return;
  }
  const AskedAlgorithm asked = resolve_algorithm(request.collective, name, options_.algorithm);
  if (asked.is_open()) {
    choose_by_cost(request);
    return;
  }
  request.algorithm = hash_of(asked);
  const bool literal = by_messages || asked.literal;
  if (!literal && asked.name == "direct" && request.collective != Collective::all_reduce) {
    return;
  }
  if (!literal && request.collective == Collective::all_reduce &&
      (asked.name == "one_shot" || asked.name == "two_shot")) {
    request.force = asked.name == "one_shot" ? Path::stage : Path::two_shot_push;
    return;
  }
  request.program = programs_.of(asked.name, request.collective, request.root);
  programs_.check_deterministic(request.program->schedule, request.ordered);
}

Explanation Communicator::explain(Collective collective, size_t bytes) {
  Explanation why;
  const AskedAlgorithm asked = resolve_algorithm(collective, "", options_.algorithm);
  const std::shared_ptr<const Program> own = programs_.own_for(collective, 0);
  const bool is_own = own != nullptr;
  why.asked = is_own || !asked.is_open();
  why.is_own = is_own;
  if (world() == 1 || collective == Collective::barrier) {
    return why;
  }
  if (goes_by_messages()) {
    const bool small = !options_.link && bytes <= group_->small_bytes();
    why.way = small && !why.asked ? Explanation::Way::entry : Explanation::Way::messages;
  } else {
    const bool fused =
        !is_own && (asked.name == "one_shot" || asked.name == "two_shot" || asked.name == "direct");
    why.way = why.asked && (asked.literal || !fused) ? Explanation::Way::messages
                                                     : Explanation::Way::memory;
  }
  const std::lock_guard<SpinLock> lock(submission_);
  why.candidates = choice_.candidates(collective);
  if (is_own) {
    why.candidates.push_back(choice_.priced(own->schedule));
  }
  why.algorithm = is_own      ? own->schedule.algorithm
                  : why.asked ? asked.name
                              : choice_.choose(collective, bytes, false);
  return why;
}

// ---- what a call is refused for before it has a number: a communicator that is over, and memory
// that another operation in flight uses

namespace {

// All communicators of the process, where DPCORE_CHECK asks whether they use the same memory at
// once. Never destroyed: communicators may go after it would.
struct Everywhere {
  std::mutex mutex;
  std::vector<Communicator*> communicators;
};
Everywhere& everywhere() {
  static auto* const all = new Everywhere;
  return *all;
}
bool checks_everywhere() {
  static const bool checks = switch_of("DPCORE_CHECK").value_or(false);
  return checks;
}

}  // namespace

void Communicator::show_memory_in_use() {
  if (checks_everywhere()) {
    const std::lock_guard<std::mutex> lock(everywhere().mutex);
    everywhere().communicators.push_back(this);
  }
}

void Communicator::hide_memory_in_use() {
  if (checks_everywhere()) {
    const std::lock_guard<std::mutex> lock(everywhere().mutex);
    std::erase(everywhere().communicators, this);
  }
}

void Communicator::check_not_forked() const {
  if (endpoint().is_forked_copy()) {
    throw Error("rank " + std::to_string(rank()) +
                ": this process was forked after init(); a communicator belongs to the process "
                "that made it. Call init() in the child, or start it with spawn");
  }
}

void Communicator::check_usable() const {
  check_not_forked();
  if (closed_.load(std::memory_order_relaxed)) {
    throw Error("rank " + std::to_string(rank()) +
                ": this communicator was finalized; call init() for a new one");
  }
  group_->failure().check();
}

void Communicator::check(const Request& request) const {
  check_usable();
  check_operator(request);
  if (checks_everywhere()) {
    check_not_in_use_elsewhere(memory_use(request, rank(), world()));
  }
}

void Communicator::check_message(const MessageCall& call) const {
  check_usable();
  if (call.peer == MessageOperation::kAnyRank && call.bytes == 0) {
    throw Unsupported("rank " + std::to_string(rank()) +
                      ": a message without elements does not travel, so it can't be received from "
                      "any rank; name the rank");
  }
  if (checks_everywhere()) {
    check_not_in_use_elsewhere(memory_use(call.sends, call.data, call.bytes));
  }
}

void Communicator::check_not_in_use(const MemoryUse& use) const {
  const auto check = [&](const auto& pool) {
    for (const auto& other : pool) {
      if (other->status.load(std::memory_order_acquire) == Operation::pending &&
          other->memory_use().conflicts_with(use)) {
        throw Unsupported("rank " + std::to_string(rank()) +
                          ": the memory of this call is in use by " + other->describe() +
                          ", which is still in flight, and one of the two writes it; call wait() "
                          "of that operation first, or pass a copy");
      }
    }
  };
  check(pool_);
  check(message_pool_);
}

void Communicator::check_not_in_use_elsewhere(const MemoryUse& use) const {
  const std::lock_guard<std::mutex> lock(everywhere().mutex);
  for (Communicator* other : everywhere().communicators) {
    const std::lock_guard<SpinLock> its_lock(other->submission_);
    other->check_not_in_use(use);
  }
}

}  // namespace dpcore
