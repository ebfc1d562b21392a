// SHA-256 (FIPS 180-4) and HMAC (RFC 2104), for the handshake of ranks on different hosts.
//
// Values only: no memory of its own, no thread. A rendezvous hashes a few hundred bytes, so the
// code is the plain one; it is too slow for large data.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace dpcore {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  Sha256& add(const void* data, size_t bytes);
  Sha256& add(std::string_view text) { return add(text.data(), text.size()); }
  Digest finish();

 private:
  void take_block(const uint8_t* block);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_{};
  uint64_t bytes_ = 0;
};

// HMAC-SHA256 of `label` followed by the bytes of the message.
Digest hmac_sha256(std::string_view key, std::string_view label, const void* message, size_t bytes);

// Takes as long for a wrong digest as for the right one.
bool equal_in_constant_time(const Digest& a, const Digest& b);

}  // namespace dpcore
