// See mailboxes.h.
#include "cuda/mapped/mailboxes.h"

#include <algorithm>

namespace dpcore {

Mailboxes::Mailboxes(StreamPages at, const std::vector<std::byte*>& boxes)
    : at_(std::move(at)), outgoing_(at_.pages.size()), incoming_(at_.pages.size()) {
  const auto me = static_cast<size_t>(at_.rank);
  FlagPage& own = *at_.on_device[me];
  for (size_t peer = 0; peer < at_.pages.size(); ++peer) {
    if (peer == me) {
      continue;
    }
    FlagPage& theirs = *at_.on_device[peer];
    outgoing_[peer].mailbox = boxes[me] + peer * kBytes;
    outgoing_[peer].sent = &own.sent[peer].value;
    outgoing_[peer].taken = &theirs.taken[me].value;
    incoming_[peer].mailbox = boxes[peer] + me * kBytes;
    incoming_[peer].sent = &theirs.sent[me].value;
    incoming_[peer].taken = &own.taken[peer].value;
  }
}

void Mailboxes::send(const void* data, size_t bytes, int to) {
  auto* from = static_cast<std::byte*>(const_cast<void*>(data));
  sends_.push_back({from, bytes, to});
}

void Mailboxes::receive(void* data, size_t bytes, int from) {
  receives_.push_back({static_cast<std::byte*>(data), bytes, from});
}

// Fragment by fragment: all mailboxes are filled before one is emptied, and a mailbox is filled
// again when the fragment before has been taken. So each rank's k-th turn needs of the others no
// more than their k-th filling and their emptying before it, and ranks do not wait in a circle.
void Mailboxes::end_group() {
  // Several messages to one peer are taken one after the other, in as many turns.
  const auto turns = [](std::vector<Message>& messages, auto fragment) {
    std::vector<std::pair<Message, size_t>> open;  // with how much of it has gone
    for (const Message& message : messages) {
      open.push_back({message, 0});
    }
    messages.clear();
    return [open = std::move(open), fragment]() mutable {
      std::vector<int> served;
      for (auto& [message, at] : open) {
        if (at >= message.bytes ||
            std::find(served.begin(), served.end(), message.peer) != served.end()) {
          continue;
        }
        const size_t n = std::min(message.bytes - at, kBytes);
        fragment(message, at, n);
        at += n;
        served.push_back(message.peer);
      }
      return !served.empty();
    };
  };
  auto send_turn = turns(sends_, [this](const Message& message, size_t at, size_t n) {
    send_fragment(message, at, n);
  });
  auto receive_turn = turns(receives_, [this](const Message& message, size_t at, size_t n) {
    receive_fragment(message, at, n);
  });
  bool goes_on = true;
  while (goes_on) {
    goes_on = send_turn();
    goes_on |= receive_turn();
  }
}

void Mailboxes::send_fragment(const Message& message, size_t at, size_t bytes) {
  Line& line = outgoing_[static_cast<size_t>(message.peer)];
  at_.device.wait_flag(at_.stream, line.taken, line.number.load());  // the mailbox is empty
  at_.device.copy(at_.stream, line.mailbox, message.data + at, bytes);
  at_.device.raise_flag(at_.stream, line.sent, ++line.number);
}

void Mailboxes::receive_fragment(const Message& message, size_t at, size_t bytes) {
  Line& line = incoming_[static_cast<size_t>(message.peer)];
  at_.device.wait_flag(at_.stream, line.sent, ++line.number);
  at_.device.copy(at_.stream, message.data + at, line.mailbox, bytes);
  at_.device.raise_flag(at_.stream, line.taken, line.number.load());
}

// ---- the end ---------------------------------------------------------------------------------

bool Mailboxes::is_taken_by(int peer) const {
  const auto p = static_cast<size_t>(peer);
  const std::atomic_ref<uint32_t> taken(at_.pages[p]->taken[at_.rank].value);
  return taken.load() == outgoing_[p].number.load();
}

void Mailboxes::let_pass() {
  const auto raise = [](FlagPage::Line& flag, uint32_t number) {
    const std::atomic_ref<uint32_t> value(flag.value);
    if (value.load() != number + kReleased) {
      value.store(number + kReleased);
    }
  };
  for (size_t peer = 0; peer < at_.pages.size(); ++peer) {
    if (static_cast<int>(peer) == at_.rank) {
      continue;
    }
    raise(at_.pages[peer]->sent[at_.rank], incoming_[peer].number.load());
    raise(at_.pages[peer]->taken[at_.rank], outgoing_[peer].number.load());
  }
}

}  // namespace dpcore
