// Short names of the integer types of hashes, tokens and counts.
#pragma once

#include <cstdint>

namespace kvrouter {

using u8 = std::uint8_t;
using u16 = std::uint16_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;

}  // namespace kvrouter
