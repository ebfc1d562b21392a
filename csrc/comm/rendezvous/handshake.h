// Which processes may connect: the handshake with which every TCP connection between ranks begins.
//
//   client -> server   Greeting   version, job, rank, purpose, a nonce
//   server -> client   Challenge  a nonce, and the proof that the server knows the secret;
//                                 or a refusal with the reason
//   client -> server   Proof      that the client knows it as well
//   server -> client   Verdict    accepted, or refused with the reason
//
// A proof is HMAC-SHA256 with the job's secret over a label for the side, the greeting and the
// server's nonce: it holds for this job, restart, rank, purpose and connection only, so nothing
// that was overheard can be used again, and neither side's proof passes for the other's. Without
// a secret (an empty key) the exchange still keeps other jobs and other programs out, and both
// sides refuse a process of another user where the kernel knows whose it is: on the same host. With
// a secret, every process that knows it may come.
//
// The server hears many connections at once, each with a buffer of fixed size and five seconds to
// say all this (pending_connections.h). Strangers and port scanners cost the ranks that belong here
// nothing but a look. Used by one thread, while ranks meet.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "comm/base/sha256.h"
#include "comm/network/tcp_socket.h"
#include "comm/rendezvous/pending_connections.h"

namespace dpcore {

enum class Purpose : uint32_t { meet = 1, line = 2 };

struct Greeting {
  uint64_t magic = 0;
  uint32_t version = 0;
  uint32_t control_bytes = 0;
  uint32_t word_order = 0;
  uint32_t purpose = 0;
  int32_t world = 0;
  int32_t rank = 0;
  int32_t line = 0;   // which of the connections of this pair of ranks
  int32_t lines = 0;  // how many a pair has
  int32_t process = 0;
  uint32_t shares_memory = 0;  // with ranks of its host
  Digest job{};
  Digest nonce{};
  char address[64] = {};  // where this rank listens
};

struct Credentials {
  std::string job;  // the same on all ranks, another one after a restart
  std::string secret;
  int rank = 0;
  int world = 1;
  int lines = 1;
  bool shares_memory = false;
};

Greeting greeting_of(const Credentials& own, Purpose purpose, int line, const std::string& address);

// Says all a client has to say. False when the server went away before its verdict; throws
// RendezvousError when it refused, could not prove itself, or the deadline is over.
bool introduce(TcpSocket& to, const Greeting& greeting, const Credentials& own,
               const std::string& server, int64_t deadline_ns,
               const TcpSocket::Interrupt& interrupted);

class HandshakeServer {
 public:
  struct Client {
    TcpSocket socket;
    Greeting greeting;
  };
  // Says why a rank that knows the secret is refused all the same; empty when it is welcome.
  using Refusal = std::function<std::string(const Greeting&)>;

  HandshakeServer(TcpSocket& listener, const Credentials& own, Refusal refusal)
      : listener_(listener), own_(own), refusal_(std::move(refusal)) {}
  // The next rank that was accepted, if one was within `wait_ms`.
  std::optional<Client> next(int wait_ms);
  // What became of the last connection that was not accepted, for messages.
  const std::string& last_refusal() const { return last_refusal_; }

 private:
  enum class Stage { greeting, proof };
  struct Handshake {  // as far as it has come
    Stage stage = Stage::greeting;
    Greeting greeting;
    Digest challenge{};
    Digest proof{};
    size_t received = 0;
  };

  ConnectionState advance(TcpSocket& socket, Handshake& handshake);
  ConnectionState answer_greeting(TcpSocket& socket, Handshake& handshake);
  ConnectionState judge(TcpSocket& socket, const Handshake& handshake);
  std::string problem_of(const Greeting& greeting) const;

  TcpSocket& listener_;
  const Credentials& own_;
  Refusal refusal_;
  PendingConnections<TcpSocket, Handshake> pending_;
  std::string last_refusal_;
};

}  // namespace dpcore
