// Both sides of the handshake. Messages have fixed sizes; no length is read from the wire.
#include "comm/rendezvous/handshake.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstring>

#include "comm/base/error.h"
#include "comm/memory/control.h"
#include "comm/network/tcp_socket.h"

namespace dpcore {
namespace {

constexpr uint64_t kGreetingMagic = 0x31'70'63'74'70'64'0d'0aull;  // no text protocol begins so
constexpr uint32_t kWireVersion = 5;
constexpr uint32_t kWordOrder = 0x01020304;
constexpr size_t kReasonBytes = 256;
constexpr std::string_view kServerLabel = "dpcore server";
constexpr std::string_view kClientLabel = "dpcore client";

struct Challenge {
  uint64_t magic = kGreetingMagic;
  uint32_t refused = 0;
  uint32_t unused = 0;
  Digest nonce{};
  Digest proof{};
  char reason[kReasonBytes] = {};
};

struct Verdict {
  uint32_t accepted = 0;
  char reason[kReasonBytes] = {};
};

Digest random_digest() {
  Digest digest;
  size_t filled = 0;
  while (filled < digest.size()) {
    const ssize_t more = getrandom(digest.data() + filled, digest.size() - filled, 0);
    if (more > 0) {
      filled += static_cast<size_t>(more);
    }
  }
  return digest;
}

Digest proof_of(const Credentials& own, std::string_view label, const Greeting& greeting,
                const Digest& nonce) {
  std::array<std::byte, sizeof(Greeting) + sizeof(Digest)> transcript;
  std::memcpy(transcript.data(), &greeting, sizeof(greeting));
  std::memcpy(transcript.data() + sizeof(greeting), nonce.data(), nonce.size());
  return hmac_sha256(own.secret, label, transcript.data(), transcript.size());
}

template <size_t Size>
void put(char (&to)[Size], const std::string& text) {
  text.copy(to, Size - 1);
}

// A new connection has room for these few bytes; if not, its owner does not read.
template <class Message>
bool say(TcpSocket& to, const Message& message) {
  try {
    return to.send_all(&message, sizeof(message), 0, nullptr);
  } catch (const NoAnswerError&) {
    return false;
  }
}

// Says so where the job has no secret and the other end belongs to another user of this host.
std::string problem_of_user(const TcpSocket& other, const Credentials& own,
                            const std::string& whose) {
  const auto user = own.secret.empty() ? user_of_peer(other) : std::nullopt;
  if (!user || *user == geteuid()) {
    return "";
  }
  return whose + " belongs to user " + std::to_string(*user) + ", and rank " +
         std::to_string(own.rank) + " to user " + std::to_string(geteuid()) +
         "; if both are of this job, set DPCORE_SECRET (or DPCORE_SECRET_FILE) to the same on all "
         "ranks";
}

template <size_t Size>
std::string text_in(const char (&from)[Size]) {
  return std::string(from, strnlen(from, Size));
}

}  // namespace

Greeting greeting_of(const Credentials& own, Purpose purpose, int line,
                     const std::string& address) {
  Greeting greeting;
  greeting.magic = kGreetingMagic;
  greeting.version = kWireVersion;
  greeting.control_bytes = sizeof(ControlBlock);
  greeting.word_order = kWordOrder;
  greeting.purpose = static_cast<uint32_t>(purpose);
  greeting.world = own.world;
  greeting.rank = own.rank;
  greeting.line = line;
  greeting.lines = own.lines;
  greeting.shares_memory = own.shares_memory ? 1 : 0;
  greeting.process = getpid();
  greeting.job = Sha256().add(own.job).finish();
  greeting.nonce = random_digest();
  put(greeting.address, address);
  return greeting;
}

bool introduce(TcpSocket& to, const Greeting& greeting, const Credentials& own,
               const std::string& server, int64_t deadline_ns,
               const TcpSocket::Interrupt& interrupted) {
  const std::string who = "rank " + std::to_string(own.rank) + ": ";
  Challenge challenge;
  try {
    if (!to.send_all(&greeting, sizeof(greeting), deadline_ns, interrupted) ||
        !to.receive_all(&challenge, sizeof(challenge), deadline_ns, interrupted)) {
      return false;
    }
  } catch (const NoAnswerError&) {
    throw RendezvousError(who + "a process listens as " + server + " at " +
                          to.peer_address().text() + " but did not answer before the deadline; " +
                          "is it stopped, or is the port taken by another program?");
  }
  const std::string stranger =
      problem_of_user(to, own, "what listens as " + server + " at " + to.peer_address().text());
  if (!stranger.empty()) {
    throw RendezvousError(who + stranger);
  }
  if (challenge.magic != kGreetingMagic) {
    throw RendezvousError(who + "what listens at " + server + " is not a rank of dpcore; choose " +
                          "another MASTER_PORT or init_method");
  }
  if (challenge.refused != 0) {
    throw RendezvousError(who + "refused by " + server + ": " + text_in(challenge.reason));
  }
  const bool is_genuine = equal_in_constant_time(
      challenge.proof, proof_of(own, kServerLabel, greeting, challenge.nonce));
  // To a server that proved nothing goes nothing but the hint that it was not believed.
  const Digest proof =
      is_genuine ? proof_of(own, kClientLabel, greeting, challenge.nonce) : Digest{};
  const bool sent = to.send_all(&proof, sizeof(proof), deadline_ns, interrupted);
  if (!is_genuine) {
    throw RendezvousError(who + server +
                          " does not know the secret of this job; set DPCORE_SECRET "
                          "(or the secret file) to the same on all ranks");
  }
  Verdict verdict;
  if (!sent || !to.receive_all(&verdict, sizeof(verdict), deadline_ns, interrupted)) {
    return false;
  }
  if (verdict.accepted != 1) {
    throw RendezvousError(who + "refused by " + server + ": " + text_in(verdict.reason));
  }
  return true;
}

std::optional<HandshakeServer::Client> HandshakeServer::next(int wait_ms) {
  auto client = pending_.next(
      listener_.fd(), wait_ms, [this] { return listener_.accept(); },
      [this](auto& connection) { return advance(connection.socket, connection.state); });
  return client ? std::optional(Client{std::move(client->socket), client->state.greeting})
                : std::nullopt;
}

ConnectionState HandshakeServer::advance(TcpSocket& socket, Handshake& handshake) {
  const bool greets = handshake.stage == Stage::greeting;
  auto* into = greets ? reinterpret_cast<std::byte*>(&handshake.greeting)
                      : reinterpret_cast<std::byte*>(&handshake.proof);
  const size_t wanted = greets ? sizeof(Greeting) : sizeof(Digest);
  const ptrdiff_t more =
      socket.receive_some(into + handshake.received, wanted - handshake.received);
  if (more < 0) {
    return ConnectionState::gone;
  }
  handshake.received += static_cast<size_t>(more);
  const bool is_stranger = greets && handshake.received >= sizeof(handshake.greeting.magic) &&
                           handshake.greeting.magic != kGreetingMagic;
  if (is_stranger) {
    return ConnectionState::gone;
  }
  if (handshake.received < wanted) {
    return ConnectionState::waiting;
  }
  handshake.received = 0;
  return greets ? answer_greeting(socket, handshake) : judge(socket, handshake);
}

// What can be said to any process: nothing here depends on the secret.
std::string HandshakeServer::problem_of(const Greeting& greeting) const {
  const Greeting own = greeting_of(own_, Purpose::meet, 0, "");
  if (greeting.version != own.version || greeting.control_bytes != own.control_bytes ||
      greeting.word_order != own.word_order) {
    return "another version of dpcore on that rank; install the same one everywhere";
  }
  if (greeting.job != own.job) {
    return "another job, or another restart of this one, meets here; every job needs a "
           "MASTER_PORT or init_method of its own";
  }
  const std::string rank = std::to_string(greeting.rank);
  if (greeting.world != own.world) {
    return "world size " + std::to_string(greeting.world) + " on rank " + rank + ", " +
           std::to_string(own.world) + " on rank " + std::to_string(own.rank);
  }
  if (greeting.rank < 0 || greeting.rank >= own.world || greeting.rank == own.rank) {
    return "rank " + rank +
           (greeting.rank == own.rank
                ? " is there already; two processes claim the same rank"
                : " does not exist in a world of " + std::to_string(own.world));
  }
  if (greeting.lines != own.lines || greeting.line < 0 || greeting.line >= own.lines) {
    return std::to_string(greeting.lines) + " connections per peer on rank " + rank + ", " +
           std::to_string(own.lines) + " on rank " + std::to_string(own.rank) +
           "; DPCORE_TCP_SOCKETS must be the same everywhere";
  }
  if (greeting.shares_memory != own.shares_memory) {
    const auto name = [](uint32_t shares) { return shares != 0 ? "'auto'" : "'tcp'"; };
    return std::string("transport ") + name(greeting.shares_memory) + " on rank " + rank + ", " +
           name(own.shares_memory) + " on rank " + std::to_string(own.rank) +
           "; it must be the same everywhere";
  }
  return "";
}

ConnectionState HandshakeServer::answer_greeting(TcpSocket& socket, Handshake& handshake) {
  std::string problem = problem_of_user(
      socket, own_, "what says to be rank " + std::to_string(handshake.greeting.rank));
  if (problem.empty()) {
    problem = problem_of(handshake.greeting);
  }
  Challenge challenge;
  if (problem.empty()) {
    handshake.challenge = challenge.nonce = random_digest();
    challenge.proof = proof_of(own_, kServerLabel, handshake.greeting, challenge.nonce);
  } else {
    last_refusal_ = problem;
    challenge.refused = 1;
    put(challenge.reason, problem);
  }
  const bool sent = say(socket, challenge);
  handshake.stage = Stage::proof;
  return sent && problem.empty() ? ConnectionState::waiting : ConnectionState::gone;
}

ConnectionState HandshakeServer::judge(TcpSocket& socket, const Handshake& handshake) {
  const Digest expected = proof_of(own_, kClientLabel, handshake.greeting, handshake.challenge);
  std::string problem;
  if (!equal_in_constant_time(handshake.proof, expected)) {
    problem = "the process that says to be rank " + std::to_string(handshake.greeting.rank) +
              " does not know the secret of this job; set DPCORE_SECRET (or the secret file) to "
              "the same on all ranks";
  } else {
    problem = refusal_(handshake.greeting);
  }
  Verdict verdict;
  verdict.accepted = problem.empty() ? 1 : 0;
  put(verdict.reason, problem);
  const bool sent = say(socket, verdict);
  if (!problem.empty()) {
    last_refusal_ = problem;
  }
  return sent && problem.empty() ? ConnectionState::accepted : ConnectionState::gone;
}

}  // namespace dpcore
