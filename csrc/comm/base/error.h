// What can go wrong, as types. One class per cause that a caller can act on; the
// bindings translate each into the Python class of the same name.
//
// A message always names the rank, the peer, the operation and its number where
// there are any, and ends with what to do.
//
// All there is to know of a class in C++ is its kind, its name and its row of kErrorClasses:
// black boxes, frames and bindings carry the kind.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace dpcore {

// The numbers are in shared memory and in frames: new ones come last.
enum class ErrorKind : uint32_t {
  none,
  peer_lost,
  timeout,
  mismatch,
  other,
  rendezvous,
  unsupported,
};

class Error : public std::runtime_error {
 public:
  explicit Error(const std::string& message, ErrorKind kind = ErrorKind::other)
      : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <ErrorKind kKind>
class TypedError : public Error {
 public:
  explicit TypedError(const std::string& message) : Error(message, kKind) {}
};

// A rank died, left, or told us that it gave up.
using PeerLost = TypedError<ErrorKind::peer_lost>;
// A rank is alive but did not come before the deadline.
using Timeout = TypedError<ErrorKind::timeout>;
// The ranks called different operations, or the same one with different arguments.
using Mismatch = TypedError<ErrorKind::mismatch>;
// The ranks did not find each other.
using RendezvousError = TypedError<ErrorKind::rendezvous>;
// While they meet: the other one is there and says nothing.
class NoAnswerError : public RendezvousError {
 public:
  using RendezvousError::RendezvousError;
};
// The request has no meaning, or no implementation here.
using Unsupported = TypedError<ErrorKind::unsupported>;

struct ErrorClass {
  ErrorKind kind;
  const char* name;                           // of the class in dpcore.errors
  void (*raise)(const std::string& message);  // throws it
};

template <class Class>
[[noreturn]] void throw_one(const std::string& message) {
  throw Class(message);
}

// By ErrorKind.
inline constexpr std::array kErrorClasses{
    ErrorClass{ErrorKind::none, "Error", throw_one<Error>},
    ErrorClass{ErrorKind::peer_lost, "PeerLost", throw_one<PeerLost>},
    ErrorClass{ErrorKind::timeout, "Timeout", throw_one<Timeout>},
    ErrorClass{ErrorKind::mismatch, "Mismatch", throw_one<Mismatch>},
    ErrorClass{ErrorKind::other, "Error", throw_one<Error>},
    ErrorClass{ErrorKind::rendezvous, "RendezvousError", throw_one<RendezvousError>},
    ErrorClass{ErrorKind::unsupported, "Unsupported", throw_one<Unsupported>},
};
static_assert([] {
  for (size_t row = 0; row < kErrorClasses.size(); ++row) {
    if (kErrorClasses[row].kind != static_cast<ErrorKind>(row)) {
      return false;
    }
  }
  return true;
}());

// A kind that came from elsewhere may be one that this version does not know.
inline const ErrorClass& class_of(ErrorKind kind) {
  const auto row = static_cast<size_t>(kind);
  return kErrorClasses[row < kErrorClasses.size() ? row : 0];
}
inline const char* name_of(ErrorKind kind) { return class_of(kind).name; }
// By the name of its class; `other` for a name that is none of these.
inline ErrorKind kind_named(const std::string& name) {
  for (const ErrorClass& one : kErrorClasses) {
    if (one.name == name && one.kind != ErrorKind::none) {
      return one.kind;
    }
  }
  return ErrorKind::other;
}
[[noreturn]] inline void throw_as(ErrorKind kind, const std::string& message) {
  class_of(kind).raise(message);
  throw Error(message);  // not reached: every row throws
}

}  // namespace dpcore
