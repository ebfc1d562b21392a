// dpcore._C.TcpListener and TcpOptions: how ranks that share no memory find each other; Link: how
// slow their network is to be. Choosing addresses and reading settings is the package's job.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/base/clock.h"
#include "comm/base/error.h"
#include "comm/base/sha256.h"
#include "comm/network/tcp_socket.h"
#include "comm/rendezvous/meet_tcp.h"
#include "comm/transport/link.h"

namespace py = pybind11;

namespace dpcore {
namespace {

using Listener = std::shared_ptr<TcpSocket>;

uint16_t port_of(const std::string& address) {
  return static_cast<uint16_t>(std::stoul(address.substr(address.rfind(':') + 1)));
}

// At exactly this address, or at the interface with this address's port.
Listener listen_at(const std::string& address, const std::string& interface) {
  if (!interface.empty()) {
    return std::make_shared<TcpSocket>(
        TcpSocket::listen_at(TcpAddress::of_interface(interface).with_port(port_of(address))));
  }
  std::string problem;
  for (const TcpAddress& candidate : TcpAddress::resolve(address)) {
    try {
      return std::make_shared<TcpSocket>(TcpSocket::listen_at(candidate));
    } catch (const RendezvousError& error) {
      problem = error.what();
    }
  }
  throw RendezvousError("rank 0: " + problem);
}

// At a free port, on the interface that leads to this address.
Listener listen_towards(const std::string& address, const std::string& interface) {
  const TcpAddress here = interface.empty()
                              ? TcpAddress::towards(TcpAddress::resolve(address).front())
                              : TcpAddress::of_interface(interface);
  return std::make_shared<TcpSocket>(TcpSocket::listen_at(here.with_port(0)));
}

// Tried out with a connection to this process.
bool knows_users_at(const std::string& address) {
  constexpr int64_t kPatienceNs = 1'000'000'000;
  TcpSocket listener = TcpSocket::listen_at(TcpAddress::resolve(address).front().with_port(0));
  std::string problem;
  const TcpSocket here =
      TcpSocket::connect_to(listener.local_address(), now_ns() + kPatienceNs, nullptr, &problem);
  const TcpSocket there = listener.accept();
  return there && user_of_peer(there).has_value();
}

py::bytes hmac(const std::string& key, const std::string& message) {
  const Digest digest = hmac_sha256(key, "", message.data(), message.size());
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

}  // namespace

void register_network(py::module_& m) {
  py::class_<TcpSocket, Listener>(m, "TcpListener")
      .def_static("at", listen_at, py::arg("address"), py::arg("interface") = "")
      .def_static("towards", listen_towards, py::arg("address"), py::arg("interface") = "")
      .def_property_readonly("address",
                             [](const TcpSocket& socket) { return socket.local_address().text(); });
  py::class_<TcpOptions, std::shared_ptr<TcpOptions>>(m, "TcpOptions")
      .def(py::init([](const std::string& root, Listener listener, const std::string& interface,
                       const std::string& secret, int sockets, bool shares_memory,
                       const std::string& host_label) {
             auto options = std::make_shared<TcpOptions>();
             options->root = root;
             options->listener = std::move(listener);
             options->interface = interface;
             options->secret = secret;
             options->lines = sockets + 1;
             options->shares_memory = shares_memory;
             options->host_label = host_label;
             return options;
           }),
           py::arg("root"), py::arg("listener").none(true), py::arg("interface"), py::arg("secret"),
           py::arg("sockets"), py::arg("shares_memory") = false, py::arg("host_label") = "")
      .def_readonly("root", &TcpOptions::root);
  py::class_<Link, std::shared_ptr<Link>>(m, "Link")
      .def(py::init([](int rank, const std::vector<std::array<double, 4>>& to, double ingress,
                       uint64_t seed) {
             LinkSettings settings{rank, {}, ingress, seed};
             for (const auto& [bytes_per_s, latency_s, jitter_s, loss] : to) {
               settings.to.push_back({bytes_per_s, latency_s, jitter_s, loss});
             }
             return std::make_shared<Link>(std::move(settings));
           }),
           py::arg("rank"), py::arg("to"), py::arg("ingress"), py::arg("seed"))
      .def(
          "send",
          [](Link& link, int peer, size_t nbytes, int priority, int64_t now) {
            return link.send(peer, nbytes, priority, now);
          },
          py::arg("peer"), py::arg("nbytes"), py::arg("priority"), py::arg("now"),
          "For tests, on a NIC of no communicator: a message is ready; what it is called.")
      .def(
          "arrival",
          [](Link& link, uint64_t ticket, int64_t now) -> std::optional<int64_t> {
            const int64_t arrival = link.arrival_ns(ticket, now);
            return arrival == Link::kUnknown ? std::nullopt : std::optional(arrival);
          },
          py::arg("ticket"), py::arg("now"),
          "When its last byte will have arrived, in ns; None while the NIC has not taken it.")
      .def("withdraw", &Link::withdraw, py::arg("ticket"), "The message will not be sent.");
  m.def("hmac_sha256", hmac, py::arg("key"), py::arg("message"));
  m.def(
      "is_loopback",
      [](const std::string& address) { return TcpAddress::resolve(address).front().is_loopback(); },
      py::arg("address"));
  m.def("knows_users_at", knows_users_at, py::arg("address"));
}

}  // namespace dpcore
