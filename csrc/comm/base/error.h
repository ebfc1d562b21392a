// What can go wrong, as types. One class per cause that a caller can act on; the
// bindings translate each into the Python class of the same name.
//
// A message always names the rank, the peer, the operation and its number where
// there are any, and ends with what to do.
#pragma once

#include <stdexcept>
#include <string>

namespace dpcore {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A rank died, left, or told us that it gave up.
class PeerLost : public Error {
 public:
  using Error::Error;
};

// A rank is alive but did not come before the deadline.
class Timeout : public Error {
 public:
  using Error::Error;
};

// The ranks called different operations, or the same one with different arguments.
class Mismatch : public Error {
 public:
  using Error::Error;
};

// The ranks did not find each other.
class RendezvousError : public Error {
 public:
  using Error::Error;
};

// The request has no meaning, or no implementation here.
class Unsupported : public Error {
 public:
  using Error::Error;
};

}  // namespace dpcore
