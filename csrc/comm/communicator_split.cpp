// Groups: a communicator for some of the ranks of another one.
//
// Everybody tells everybody its color, key, where its control block lies and how many groups it
// has made; so all members agree on ranks and on the group's name without another word.
#include <algorithm>

#include "comm/communicator.h"

namespace dpcore {

std::shared_ptr<Communicator> Communicator::split(int color, int key,
                                                  const Engine::Interrupt& interrupt) {
  check_usable();
  struct Entry {
    int32_t color;
    int32_t key;
    uint32_t groups_made;
    uint64_t offset;
  };
  // Nobody knows yet how large its group will be: room for everybody.
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
  // A barrier: nobody looks at a control block, or sends a frame, before it is prepared.
  run(Request{}, "auto", interrupt);
  if (new_world == 0) {
    return nullptr;
  }
  auto group = std::make_shared<Group>(context_->endpoint_ptr(), std::move(members), new_rank,
                                       offsets, std::move(block), std::move(remote));
  return std::shared_ptr<Communicator>(new Communicator(options_, context_, std::move(group)));
}

}  // namespace dpcore
