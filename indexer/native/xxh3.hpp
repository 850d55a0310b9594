// XXH3-64 with a seed, from its public specification (xxHash's xxhash_spec.md).
#pragma once

#include <cstddef>
#include <cstring>

#include "integers.hpp"

namespace kvrouter::xxh3 {

inline constexpr u32 kPrime32_1 = 0x9E3779B1U, kPrime32_2 = 0x85EBCA77U, kPrime32_3 = 0xC2B2AE3DU;
inline constexpr u64 kPrime64_1 = 0x9E3779B185EBCA87ULL, kPrime64_2 = 0xC2B2AE3D27D4EB4FULL;
inline constexpr u64 kPrime64_3 = 0x165667B19E3779F9ULL, kPrime64_4 = 0x85EBCA77C2B2AE63ULL;
inline constexpr u64 kPrime64_5 = 0x27D4EB2F165667C5ULL;
inline constexpr u64 kPrimeMx1 = 0x165667919E3779F9ULL, kPrimeMx2 = 0x9FB21C651E98DF25ULL;

// The specification's default secret.
inline constexpr u8 kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

inline u32 swap32(u32 x) { return __builtin_bswap32(x); }
inline u64 swap64(u64 x) { return __builtin_bswap64(x); }

inline u32 read32(const u8* p) {
    u32 x;
    std::memcpy(&x, p, sizeof x);
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? swap32(x) : x;
}

inline u64 read64(const u8* p) {
    u64 x;
    std::memcpy(&x, p, sizeof x);
    return __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__ ? swap64(x) : x;
}

inline u64 rotl(u64 x, int by) { return x << by | x >> (64 - by); }

// The two halves of a 128-bit product, folded into one.
inline u64 mul_fold(u64 a, u64 b) {
    __extension__ using u128 = unsigned __int128;
    const u128 product = static_cast<u128>(a) * b;
    return static_cast<u64>(product) ^ static_cast<u64>(product >> 64);
}

inline u64 avalanche(u64 x) {
    x ^= x >> 37;
    x *= kPrimeMx1;
    return x ^ x >> 32;
}

inline u64 avalanche_xxh64(u64 x) {
    x ^= x >> 33;
    x *= kPrime64_2;
    x ^= x >> 29;
    x *= kPrime64_3;
    return x ^ x >> 32;
}

inline u64 mix16(const u8* data, const u8* secret, u64 seed) {
    return mul_fold(read64(data) ^ (read64(secret) + seed), read64(data + 8) ^ (read64(secret + 8) - seed));
}

inline u64 hash_0_to_16(const u8* data, std::size_t size, u64 seed) {
    if (size > 8) {
        const u64 flip_low = (read64(kSecret + 24) ^ read64(kSecret + 32)) + seed;
        const u64 flip_high = (read64(kSecret + 40) ^ read64(kSecret + 48)) - seed;
        const u64 low = read64(data) ^ flip_low, high = read64(data + size - 8) ^ flip_high;
        return avalanche(size + swap64(low) + high + mul_fold(low, high));
    }
    if (size >= 4) {
        seed ^= static_cast<u64>(swap32(static_cast<u32>(seed))) << 32;
        const u64 both = read32(data + size - 4) + (static_cast<u64>(read32(data)) << 32);
        u64 x = both ^ ((read64(kSecret + 8) ^ read64(kSecret + 16)) - seed);
        x ^= rotl(x, 49) ^ rotl(x, 24);
        x *= kPrimeMx2;
        x ^= (x >> 35) + size;
        x *= kPrimeMx2;
        return x ^ x >> 28;
    }
    if (size > 0) {
        const u32 both = static_cast<u32>(data[0]) << 16 | static_cast<u32>(data[size >> 1]) << 24 | data[size - 1] |
                         static_cast<u32>(size) << 8;
        return avalanche_xxh64(both ^ ((read32(kSecret) ^ read32(kSecret + 4)) + seed));
    }
    return avalanche_xxh64(seed ^ read64(kSecret + 56) ^ read64(kSecret + 64));
}

inline u64 hash_17_to_128(const u8* data, std::size_t size, u64 seed) {
    u64 x = size * kPrime64_1;
    for (std::size_t round = (size - 1) / 32 + 1; round-- > 0;) {
        x += mix16(data + 16 * round, kSecret + 32 * round, seed);
        x += mix16(data + size - 16 * (round + 1), kSecret + 32 * round + 16, seed);
    }
    return avalanche(x);
}

inline u64 hash_129_to_240(const u8* data, std::size_t size, u64 seed) {
    u64 x = size * kPrime64_1;
    for (std::size_t round = 0; round < 8; ++round) x += mix16(data + 16 * round, kSecret + 16 * round, seed);
    x = avalanche(x);
    for (std::size_t round = 8; round < size / 16; ++round)
        x += mix16(data + 16 * round, kSecret + 16 * (round - 8) + 3, seed);
    return avalanche(x + mix16(data + size - 16, kSecret + 136 - 17, seed));
}

inline void accumulate(u64* lanes, const u8* stripe, const u8* secret) {
    for (int lane = 0; lane < 8; ++lane) {
        const u64 value = read64(stripe + 8 * lane), key = value ^ read64(secret + 8 * lane);
        lanes[lane ^ 1] += value;
        lanes[lane] += (key & 0xFFFFFFFFU) * (key >> 32);
    }
}

inline u64 hash_long(const u8* data, std::size_t size, u64 seed) {
    u8 secret[192];
    for (int at = 0; at < 192; at += 16) {
        u64 low = read64(kSecret + at) + seed, high = read64(kSecret + at + 8) - seed;
        if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__) low = swap64(low), high = swap64(high);
        std::memcpy(secret + at, &low, 8);
        std::memcpy(secret + at + 8, &high, 8);
    }
    u64 lanes[8] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3, kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
    constexpr std::size_t kStripe = 64, kStripes = (192 - 64) / 8, kBlock = kStripe * kStripes;
    const std::size_t blocks = (size - 1) / kBlock;
    for (std::size_t block = 0; block < blocks; ++block) {
        for (std::size_t stripe = 0; stripe < kStripes; ++stripe)
            accumulate(lanes, data + block * kBlock + stripe * kStripe, secret + 8 * stripe);
        for (int lane = 0; lane < 8; ++lane) {  // scramble
            u64 x = lanes[lane];
            x ^= x >> 47;
            x ^= read64(secret + 128 + 8 * lane);
            lanes[lane] = x * kPrime32_1;
        }
    }
    const std::size_t stripes = (size - 1 - blocks * kBlock) / kStripe;
    for (std::size_t stripe = 0; stripe < stripes; ++stripe)
        accumulate(lanes, data + blocks * kBlock + stripe * kStripe, secret + 8 * stripe);
    accumulate(lanes, data + size - kStripe, secret + 192 - 64 - 7);
    u64 x = size * kPrime64_1;
    for (int pair = 0; pair < 4; ++pair) {
        const u8* key = secret + 11 + 16 * pair;
        x += mul_fold(lanes[2 * pair] ^ read64(key), lanes[2 * pair + 1] ^ read64(key + 8));
    }
    return avalanche(x);
}

inline u64 hash(const void* bytes, std::size_t size, u64 seed) {
    const u8* data = static_cast<const u8*>(bytes);
    if (size <= 16) return hash_0_to_16(data, size, seed);
    if (size <= 128) return hash_17_to_128(data, size, seed);
    if (size <= 240) return hash_129_to_240(data, size, seed);
    return hash_long(data, size, seed);
}

}  // namespace kvrouter::xxh3
