// FNV-1a, a word at a time: the hash by which ranks compare what they were asked to do. Not
// safe against an attacker: that is sha256.h.
#pragma once

#include <cstdint>
#include <string>

namespace dpcore {

class Fnv {
 public:
  Fnv& add(uint64_t word) {
    value_ = (value_ ^ word) * 0x100000001b3ull;
    return *this;
  }
  Fnv& add(const std::string& text) {
    for (const char c : text) {
      add(static_cast<unsigned char>(c));
    }
    return *this;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace dpcore
