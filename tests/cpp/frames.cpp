// What a network does with bytes that no rank would send: frames that are cut, repeated, too long,
// of other versions, random, or one byte at a time.
//
//   frames SEED ROUNDS     its own random streams
//   frames streams         streams from standard input (tests/comm/test_frames.py makes them)
//
// Whole frames are delivered in order; at the first that is none the connection is given up, with
// a reason, and no memory was taken for what a header says. Built under the sanitizers.
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "comm/base/clock.h"
#include "comm/network/network.h"

using namespace dpcore;

namespace {

constexpr uint64_t kGroup = 7;
constexpr int kPeer = 1;

using Dice = std::mt19937_64;

struct Seen {
  uint64_t operation;
  std::vector<std::byte> payload;
};

class Recorder final : public Network::Target {
 public:
  void take(int peer, const FrameHeader& frame, const std::byte* payload) override {
    CHECK(peer == kPeer && frame.group == kGroup);
    seen.push_back({frame.operation, {payload, payload + frame.bytes}});
  }
  bool wants_data() const override { return true; }
  std::vector<Seen> seen;
};

// A network of two ranks of which the test itself is the other one.
struct Line {
  Line() {
    TcpSocket listener = TcpSocket::listen_at(TcpAddress::resolve("127.0.0.1:0").front());
    std::vector<TcpPeer> peers(2);
    for (int i = 0; i < 2; ++i) {  // for control frames, and for data
      std::string problem;
      other.push_back(
          TcpSocket::connect_to(listener.local_address(), now_ns() + to_ns(5), nullptr, &problem));
      TcpSocket accepted;
      while (!(accepted = listener.accept())) {
      }
      peers[kPeer].lines.push_back(std::move(accepted));
    }
    network = std::make_unique<Network>(0, std::move(peers), Network::make_wake_event());
    network->add_group(kGroup, &recorder);
  }
  std::vector<TcpSocket> other;
  std::unique_ptr<Network> network;
  Recorder recorder;
};

std::vector<std::byte> bytes_of(const FrameHeader& header, Dice& dice) {
  std::vector<std::byte> bytes(sizeof(header) + header.bytes);
  std::memcpy(bytes.data(), &header, sizeof(header));
  for (size_t i = sizeof(header); i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::byte>(dice());
  }
  return bytes;
}

FrameHeader control_frame(uint64_t number, Dice& dice) {
  FrameHeader frame;
  const FrameKind kinds[] = {FrameKind::post, FrameKind::finished, FrameKind::failed,
                             FrameKind::left, FrameKind::alive};
  frame.kind = kinds[dice() % 5];
  frame.group = kGroup;
  frame.operation = number;
  frame.bytes = frame.kind == FrameKind::post     ? sizeof(PostBody) + dice() % kMaxPostedBytes
                : frame.kind == FrameKind::failed ? sizeof(FailureRecord)
                                                  : 0;
  return frame;
}

// A header that no rank of this version sends.
FrameHeader spoiled(FrameHeader frame, Dice& dice) {
  switch (dice() % 5) {
    case 0:
      frame.magic ^= 1u << dice() % 32;
      break;
    case 1:
      frame.kind = static_cast<FrameKind>(7 + dice() % 200);
      break;
    case 2:
      frame.bytes = 0x7fffffff;
      break;
    case 3:
      frame = {};
      frame.kind = FrameKind::data;  // belongs on another connection
      frame.bytes = 8;
      frame.total = 8;
      break;
    default:
      frame.kind = FrameKind::post;
      frame.bytes = sizeof(PostBody);
      frame.offset = ~uint64_t{0} - dice() % 4096;
  }
  return frame;
}

void send_in_pieces(TcpSocket& to, const std::vector<std::byte>& bytes, Network& network,
                    Dice& dice) {
  const size_t most = dice() % 4 == 0 ? 1 : 1 + dice() % 70'000;
  size_t sent = 0;
  while (sent < bytes.size()) {
    const size_t piece = std::min(bytes.size() - sent, bytes.size() > 5000 ? most + 500 : most);
    if (!to.send_all(bytes.data() + sent, piece, now_ns() + to_ns(5), [&] { network.poll(); })) {
      return;  // it was given up already
    }
    sent += piece;
    network.poll();
  }
}

void poll_until_lost(Network& network) {
  const int64_t deadline = now_ns() + to_ns(10);
  while (!network.is_lost(kPeer)) {
    network.poll();
    network.look_for_broken_lines();
    CHECK(now_ns() < deadline);
  }
  CHECK(!network.problem_of(kPeer).empty());
}

void control_round(Dice& dice) {
  Line line;
  std::vector<Seen> sent;
  std::vector<std::byte> stream;
  const uint64_t frames = dice() % 8;
  for (uint64_t i = 0; i < frames; ++i) {
    const auto bytes = bytes_of(control_frame(i, dice), dice);
    sent.push_back({i, {bytes.begin() + sizeof(FrameHeader), bytes.end()}});
    stream.insert(stream.end(), bytes.begin(), bytes.end());
  }
  const auto end = dice() % 3;
  if (end == 0) {  // cut off in the middle of a frame
    const auto bytes = bytes_of(control_frame(frames, dice), dice);
    stream.insert(stream.end(), bytes.begin(), bytes.begin() + dice() % bytes.size());
  } else if (end == 1) {
    const FrameHeader header = spoiled(control_frame(frames, dice), dice);
    const auto* begin = reinterpret_cast<const std::byte*>(&header);
    stream.insert(stream.end(), begin, begin + sizeof(header));
  } else {
    for (int i = 0; i < 300; ++i) {
      stream.push_back(static_cast<std::byte>(dice()));
    }
  }
  send_in_pieces(line.other[0], stream, *line.network, dice);
  if (end == 0) {
    line.other[0] = TcpSocket();
  }
  poll_until_lost(*line.network);
  CHECK(line.recorder.seen.size() == sent.size());
  for (size_t i = 0; i < sent.size(); ++i) {
    CHECK(line.recorder.seen[i].operation == sent[i].operation);
    CHECK(line.recorder.seen[i].payload == sent[i].payload);
  }
}

// Data that no operation asks for is set aside whole; nonsense behind it ends the connection.
void data_round(Dice& dice) {
  Line line;
  const size_t total = 1 + dice() % 300'000;
  FrameHeader header;
  header.group = kGroup;
  header.operation = dice() % 100;
  header.bytes = static_cast<uint32_t>(total);
  header.total = total;
  const auto bytes = bytes_of(header, dice);
  const auto pump = [&] {
    line.network->poll();
    line.network->set_aside_unexpected(true);
  };
  size_t at = 0;
  while (at < bytes.size()) {
    const size_t piece = std::min<size_t>(bytes.size() - at, 1 + dice() % 40'000);
    CHECK(line.other[1].send_all(bytes.data() + at, piece, now_ns() + to_ns(5), pump));
    at += piece;
    pump();
  }
  std::vector<std::byte> received(total);
  size_t have = 0;
  auto take = [&](const std::byte* data, size_t offset, size_t n) {
    std::memcpy(received.data() + offset, data, n);
  };
  const Message message{{header.operation, 0}, total};
  const int64_t deadline = now_ns() + to_ns(10);
  while (have < total) {
    pump();
    have = line.network->take_aside(kPeer, kPeer, kGroup, message, have, Sink(take));
    CHECK(now_ns() < deadline);
  }
  CHECK(std::memcmp(received.data(), bytes.data() + sizeof(header), total) == 0);

  FrameHeader wrong = header;
  wrong.offset = dice() % 2 == 0 ? 1 : ~uint64_t{0};  // it would reach beyond the message
  CHECK(line.other[1].send_all(&wrong, sizeof(wrong), now_ns() + to_ns(5), nullptr));
  const int64_t patience = now_ns() + to_ns(10);
  while (!line.network->is_lost(kPeer)) {
    pump();
    line.network->look_for_broken_lines();
    CHECK(now_ns() < patience);
  }
}

bool read_bytes(void* to, size_t bytes) { return std::fread(to, 1, bytes, stdin) == bytes; }

// For each stream in the input, sent in the pieces that it says and then cut off: a line that
// says what was delivered, and why the connection was given up.
void streams_from_input() {
  std::printf("%zu %zu\n", sizeof(PostBody), sizeof(FailureRecord));
  std::fflush(stdout);
  uint32_t pieces = 0;
  while (read_bytes(&pieces, sizeof(pieces))) {
    Line line;
    bool is_open = true;
    for (uint32_t i = 0; i < pieces; ++i) {
      uint32_t size = 0;
      CHECK(read_bytes(&size, sizeof(size)));
      std::vector<std::byte> piece(size);
      CHECK(read_bytes(piece.data(), size));
      is_open = is_open && line.other[0].send_all(piece.data(), size, now_ns() + to_ns(5),
                                                  [&] { line.network->poll(); });
      line.network->poll();
    }
    line.other[0] = TcpSocket();
    poll_until_lost(*line.network);
    for (const Seen& one : line.recorder.seen) {
      uint64_t sum = 0;
      for (const std::byte byte : one.payload) {
        sum = sum * 31 + static_cast<uint64_t>(byte);
      }
      std::printf("%lu:%zu:%lu ", one.operation, one.payload.size(), sum);
    }
    std::printf("| %s\n", line.network->problem_of(kPeer).c_str());
    std::fflush(stdout);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 2 && std::string(argv[1]) == "streams") {
    streams_from_input();
    return 0;
  }
  CHECK(argc == 3);
  const auto seed = static_cast<uint64_t>(std::atoll(argv[1]));
  const int rounds = std::atoi(argv[2]);
  Dice dice(seed);
  for (int round = 0; round < rounds; ++round) {
    control_round(dice);
    data_round(dice);
  }
  std::printf("frames: seed %lu, %d rounds: fine\n", seed, rounds);
  return 0;
}
