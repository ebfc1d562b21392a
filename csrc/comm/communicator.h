// The front of the core: what bindings and the reducer call.
//
// A communicator is a group of ranks with a sequence of collectives: every rank calls the same
// ones in the same order. It belongs to a context (endpoint and engine) that all communicators
// split from the same init() share.
//
// Threads: any thread may call. The number of an operation is given when it is submitted, under
// a spin lock of a few instructions, so calls from several threads are ordered, though it is up
// to the program that all ranks order them alike.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/base/spin_lock.h"
#include "comm/engine/engine.h"
#include "comm/operations/collective_operation.h"
#include "comm/operations/message_operation.h"
#include "comm/schedule/choice.h"
#include "comm/schedule/program.h"

namespace dpcore {

struct Options {
  std::string job;  // name of the rendezvous, the same on all ranks
  int rank = 0;
  int world = 1;
  double timeout_s = 30.0;
  double meets_within_s = 0;        // until all ranks have come; 0: timeout_s
  bool threads = false;             // ranks are threads of this process
  std::shared_ptr<TcpOptions> tcp;  // when given: how ranks that share no memory find each other
  std::shared_ptr<Link> link;       // when given: holds messages back, see link.h
  std::string algorithm = "auto";
  bool deterministic = false;  // only algorithms whose result does not depend on the layout
  CostConstants costs;         // of this machine; those of rank 0 count
  Engine::Interrupt interrupt;
};

// What would run for a collective of so many bytes, and why.
struct Explanation {
  enum class Way { alone, memory, entry, messages };
  Way way = Way::alone;
  std::string algorithm;  // where it is one of a list: asked for, or chosen
  bool asked = false;
  bool is_own = false;  // a list of the program's
  std::vector<AlgorithmChoice::Candidate> candidates;
};

// Endpoint and engine of one init(), and the memory of closed communicators that peers may
// still look at.
class Context {
 public:
  explicit Context(std::shared_ptr<Endpoint> endpoint)
      : endpoint_(std::move(endpoint)), engine_(endpoint_) {}
  Endpoint& endpoint() const { return *endpoint_; }
  std::shared_ptr<Endpoint> endpoint_ptr() const { return endpoint_; }
  Engine& engine() { return engine_; }
  // Names of groups in frames: that of init(), and for the others the rank + 1 of the first
  // member and the number of groups that it has taken part in making.
  static constexpr uint64_t kRootGroup = 0;
  static uint64_t group_name(int first_member, uint32_t its_count) {
    return (static_cast<uint64_t>(first_member) + 1) << 32 | its_count;
  }
  uint32_t next_group() { return ++groups_; }
  bool has_further_groups() const { return groups_.load() > 0; }
  void keep_until_all_left(std::shared_ptr<Group> group,
                           std::vector<std::shared_ptr<std::byte>> blocks);

 private:
  struct Closed {
    std::shared_ptr<Group> group;
    std::vector<std::shared_ptr<std::byte>> blocks;
  };
  std::shared_ptr<Endpoint> endpoint_;
  std::mutex mutex_;
  std::vector<Closed> closed_;
  std::atomic<uint32_t> groups_{0};
  Engine engine_;
};

// Ranks that are to join, where they have knocked: at one of the ranks, which has the functions.
struct Guests {
  int count = 0;
  // Tells them the name of the meeting, where it listens (nothing within a host), and whether ranks
  // of the same host share memory.
  std::function<void(const std::string& job, const std::string& meeting, bool shares_memory)>
      invite;
  std::function<bool()> are_gone;  // whether one of them will not come
};

using Work = std::shared_ptr<Operation>;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  static std::shared_ptr<Communicator> start(const Options& options);
  ~Communicator();

  int rank() const { return group_->rank(); }
  int world() const { return group_->world(); }
  double timeout_s() const { return options_.timeout_s; }
  Endpoint& endpoint() const { return context_->endpoint(); }
  // Where other hosts reach this rank, also when those of its ranks that live share one; empty
  // where the ranks met without a network.
  const std::string& address() const {
    return (first_ ? *first_ : *this).context_->endpoint().address();
  }
  Group& group() const { return *group_; }
  SharedState& shared() const { return *shared_; }

  // `algorithm` empty: the communicator's own. Validates before anything is submitted.
  void run(Request&& request, const std::string& algorithm, const Engine::Interrupt& interrupt);
  // What every rank says of itself: a value of plain memory.
  template <class Value>
  std::vector<Value> hear_all(const Value& own, const Engine::Interrupt& interrupt) {
    std::vector<Value> all(static_cast<size_t>(world()));
    Request request;
    request.collective = Collective::all_gather;
    request.count = sizeof(Value);
    request.input = reinterpret_cast<const std::byte*>(&own);
    request.output = reinterpret_cast<std::byte*>(all.data());
    run(std::move(request), "auto", interrupt);
    return all;
  }
  // The same as run(), but returns the operation to be waited for when it is not complete after so
  // many polls, and null when it is.
  Work begin(Request&& request, const std::string& algorithm, int polls);
  // Throws before the operation has a number, or not at all. Not in `background`: only waits drive
  // it, so a thread must wait for it on every rank. `after`: one of this communicator's that makes
  // what this one sends; they follow each other without a wait between them.
  Work submit(Request&& request, const std::string& algorithm, bool background = true,
              Work after = nullptr);
  // Lets calls of its collective and root that name no algorithm run this schedule; groups that
  // split() makes do not. By one thread, before the first call, and the same on all ranks.
  void run_by_default(const Schedule& schedule);

  void run_message(const MessageCall& call, const Engine::Interrupt& interrupt);
  Work submit_message(const MessageCall& call);

  // Until the operation is complete; raises what went wrong.
  void wait(Operation& operation, double timeout_s, const Engine::Interrupt& interrupt);
  void check_not_forked() const;
  void check_usable() const;

  // Ranks with the same color form a communicator, ordered by key, then rank. A negative color
  // takes part in the call and gets none.
  std::shared_ptr<Communicator> split(int color, int key, const Engine::Interrupt& interrupt);

  // Of one that failed: a communicator of the ranks that live, in the same order, once they agree
  // (group/agreement.h). Ranks that have not come after so many seconds are left behind; 0: the
  // timeout. This one then is of no further use. Throws PeerLost where this rank may not go on.
  std::shared_ptr<Communicator> shrink(double patience_s, const Engine::Interrupt& interrupt);
  // At the same place on all ranks, when nothing has failed: a communicator of these ranks and,
  // behind them, of as many others, with a new line of failures. Without the others if they do not
  // come, and as after shrink() if a rank dies.
  std::shared_ptr<Communicator> grow(const Guests& guests, double patience_s,
                                     const Engine::Interrupt& interrupt);
  // All ranks are known to be in the communicator that grow() returned: what was before it goes.
  void let_go_of_before();
  // Of one that shrink() or grow() made: the ranks that its members had before, and how many
  // operations all of them had completed there.
  const std::vector<int>& survivors() const { return survivors_; }
  uint64_t completed_before() const { return completed_before_; }

  // Zero-filled memory that all ranks of the host can reach.
  std::shared_ptr<std::byte> allocate(size_t bytes) { return endpoint().arena().allocate(bytes); }

  // For `dpcore inspect`: where the program is, and since when. By one thread.
  void show_placement(const std::string& where, int64_t since_ns);
  // Tells the peers that this rank gives up, and why; every rank's next call raises.
  void abort(const std::string& reason);
  // Waits for operations in flight, then leaves. Later calls raise. A failure of which the program
  // was not told is left for the caller to ask (Group::is_unacknowledged): this is called by
  // destructors too. `interrupted`: throws when the wait shall end; without it a long timeout is
  // cut short.
  void close(const Engine::Interrupt& interrupted = {});
  Explanation explain(Collective collective, size_t bytes);
  bool closed() const { return closed_.load() || is_shrunk_.load() || endpoint().is_forked_copy(); }

 private:
  friend class Shrinking;  // communicator_shrink.cpp
  Communicator(Options options, std::shared_ptr<Context> context, std::shared_ptr<Group> group);
  void choose_algorithm(Request& request, const std::string& algorithm);
  void choose_by_cost(Request& request);
  std::vector<int> hosts_for_costs() const;
  // Where data has to travel as messages.
  bool goes_by_messages() const { return group_->remote() != nullptr || options_.link; }
  void check(const Request& request) const;
  // Both under the submission lock. The operation is the pool's, and is not taken out of there
  // again before it is complete.
  CollectiveOperation& prepare(Request&& request, const std::string& algorithm);
  MessageOperation& prepare_message(const MessageCall& call);
  void check_message(const MessageCall& call) const;
  template <class T>
  T& from_pool(std::vector<std::shared_ptr<T>>& pool);
  void make_pending(Operation& operation, double timeout_s) const;
  // Throws Unsupported where an operation of this communicator in flight uses the same memory, and
  // one of the two writes it. Under the submission lock.
  void check_not_in_use(const MemoryUse& use) const;
  // The same for all communicators of the process, for DPCORE_CHECK; without that lock. They are
  // shown to each other from the constructor to the destructor.
  void check_not_in_use_elsewhere(const MemoryUse& use) const;
  void show_memory_in_use();
  void hide_memory_in_use();

  Options options_;
  const bool is_open_ = options_.algorithm == "auto";  // which algorithm runs
  std::shared_ptr<Context> context_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<SharedState> shared_;
  std::atomic<bool> closed_{false};
  // Made by shrink(): the first of the line, in whose control blocks the ranks agree. It stays
  // until the last of the line is closed, though the program may have closed it.
  std::shared_ptr<Communicator> first_;
  std::shared_ptr<Communicator> before_;  // made by grow(): where other ranks may still agree
  std::atomic<bool> is_shrunk_{false};    // another one has taken its place
  std::vector<int> places_;               // of the members, in the first
  std::vector<int> survivors_;
  uint64_t completed_before_ = 0;
  SpinLock submission_;
  // Under the submission lock:
  uint64_t next_number_ = 0;
  std::vector<std::shared_ptr<CollectiveOperation>> pool_;
  std::vector<std::shared_ptr<MessageOperation>> message_pool_;
  size_t pool_at_ = 0;
  AlgorithmChoice choice_;
  ProgramCache programs_;
};

}  // namespace dpcore
