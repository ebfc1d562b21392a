// Connections whose rank is not known yet: more of them at once than are heard side by
// side.
//
// All clients have spoken before the first one is accepted, as the ranks of many hosts have that
// reach rank 0 while it is busy: none may be turned away. Those that stay silent make room.
#include <sys/socket.h>

#include <cstdio>
#include <string>
#include <vector>

#include "check.h"
#include "comm/network/tcp_socket.h"
#include "comm/rendezvous/pending_connections.h"

using namespace dpcore;

namespace {

constexpr int kSilent = 300;
constexpr int kSpeaking = 300;

struct Nothing {};
using Pending = PendingConnections<TcpSocket, Nothing>;

TcpSocket connect_to(const TcpSocket& listener) {
  std::string problem;
  TcpSocket client =
      TcpSocket::connect_to(listener.local_address(), now_ns() + to_ns(5), nullptr, &problem);
  CHECK(client);
  return client;
}

ConnectionState hear(Pending::Connection& connection) {
  char said = 0;
  const ssize_t bytes = recv(connection.socket.fd(), &said, 1, MSG_DONTWAIT);
  if (bytes == 0) {
    return ConnectionState::gone;
  }
  return bytes == 1 ? ConnectionState::accepted : ConnectionState::waiting;
}

void no_speaker_is_turned_away(int silent) {
  TcpSocket listener = TcpSocket::listen_at(TcpAddress::resolve("127.0.0.1:0").front());
  std::vector<TcpSocket> clients;
  for (int i = 0; i < silent + kSpeaking; ++i) {
    clients.push_back(connect_to(listener));
    if (i >= silent) {
      CHECK(send(clients.back().fd(), "x", 1, MSG_NOSIGNAL) == 1);
    }
  }
  Pending pending;
  int accepted = 0;
  const int64_t deadline = now_ns() + to_ns(20);
  while (accepted < kSpeaking && now_ns() < deadline) {
    accepted += pending.next(listener.fd(), 20, [&] { return listener.accept(); }, hear) ? 1 : 0;
  }
  CHECK(accepted == kSpeaking);
}

}  // namespace

int main() {
  no_speaker_is_turned_away(0);
  no_speaker_is_turned_away(kSilent);
  std::printf("meeting: fine\n");
  return 0;
}
