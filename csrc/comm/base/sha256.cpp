// The constants are computed as the standard defines them: the first 32 bits of the fractional
// parts of the square and cube roots of the first primes.
#include "comm/base/sha256.h"

#include <bit>
#include <cstring>

namespace dpcore {
namespace {

constexpr int kRounds = 64;

// floor(frac(root) * 2^32), where root^power = prime, by bisection over integers.
constexpr uint32_t fraction_of_root(uint64_t prime, int power) {
  __extension__ using Wide = unsigned __int128;
  // The root, times 2^32, lies in [low, high): its power is compared with prime * 2^(32 * power).
  uint64_t low = 0;
  uint64_t high = uint64_t{1} << 40;
  while (high - low > 1) {
    const uint64_t middle = low + (high - low) / 2;
    const Wide square = static_cast<Wide>(middle) * middle;
    const bool too_much = power == 2 ? square > (static_cast<Wide>(prime) << 64)
                                     : square * middle > (static_cast<Wide>(prime) << 96);
    (too_much ? high : low) = middle;
  }
  return static_cast<uint32_t>(low);
}

struct Constants {
  std::array<uint32_t, 8> start{};
  std::array<uint32_t, kRounds> round{};
};

constexpr Constants make_constants() {
  Constants constants;
  int found = 0;
  for (uint64_t candidate = 2; found < kRounds; ++candidate) {
    bool is_prime = true;
    for (uint64_t divisor = 2; divisor * divisor <= candidate; ++divisor) {
      is_prime &= candidate % divisor != 0;
    }
    if (is_prime) {
      if (found < 8) {
        constants.start[found] = fraction_of_root(candidate, 2);
      }
      constants.round[found++] = fraction_of_root(candidate, 3);
    }
  }
  return constants;
}

constexpr Constants kConstants = make_constants();
static_assert(kConstants.start[0] == 0x6a09e667 && kConstants.round[63] == 0xc67178f2);

}  // namespace

Sha256::Sha256() : state_(kConstants.start) {}

void Sha256::take_block(const uint8_t* block) {
  std::array<uint32_t, kRounds> w;
  for (int i = 0; i < 16; ++i) {
    w[i] = uint32_t{block[4 * i]} << 24 | uint32_t{block[4 * i + 1]} << 16 |
           uint32_t{block[4 * i + 2]} << 8 | block[4 * i + 3];
  }
  for (int i = 16; i < kRounds; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int i = 0; i < kRounds; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kConstants.round[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g;
    g = f;
    f = e;
    e = d + t1;
    d = c;
    c = b;
    b = a;
    a = t1 + t2;
  }
  const std::array<uint32_t, 8> more{a, b, c, d, e, f, g, h};
  for (int i = 0; i < 8; ++i) {
    state_[i] += more[i];
  }
}

Sha256& Sha256::add(const void* data, size_t bytes) {
  const auto* from = static_cast<const uint8_t*>(data);
  for (size_t i = 0; i < bytes; ++i) {
    block_[bytes_++ % block_.size()] = from[i];
    if (bytes_ % block_.size() == 0) {
      take_block(block_.data());
    }
  }
  return *this;
}

Digest Sha256::finish() {
  const uint64_t bits = bytes_ * 8;
  const uint8_t end = 0x80;
  add(&end, 1);
  const uint8_t zero = 0;
  while (bytes_ % block_.size() != block_.size() - 8) {
    add(&zero, 1);
  }
  for (int shift = 56; shift >= 0; shift -= 8) {
    const auto byte = static_cast<uint8_t>(bits >> shift);
    add(&byte, 1);
  }
  Digest digest;
  for (size_t i = 0; i < digest.size(); ++i) {
    digest[i] = static_cast<uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
  }
  return digest;
}

Digest hmac_sha256(std::string_view key, std::string_view label, const void* message,
                   size_t bytes) {
  std::array<uint8_t, 64> pad{};
  if (key.size() > pad.size()) {
    const Digest shortened = Sha256().add(key).finish();
    std::memcpy(pad.data(), shortened.data(), shortened.size());
  } else if (!key.empty()) {
    std::memcpy(pad.data(), key.data(), key.size());
  }
  for (uint8_t& byte : pad) {
    byte ^= 0x36;
  }
  Sha256 inner;
  inner.add(pad.data(), pad.size()).add(label).add(message, bytes);
  const Digest digest = inner.finish();
  for (uint8_t& byte : pad) {
    byte ^= 0x36 ^ 0x5c;
  }
  Sha256 outer;
  return outer.add(pad.data(), pad.size()).add(digest.data(), digest.size()).finish();
}

bool equal_in_constant_time(const Digest& a, const Digest& b) {
  uint8_t difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference |= a[i] ^ b[i];
  }
  return difference == 0;
}

}  // namespace dpcore
