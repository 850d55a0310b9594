// Token ids as a JSON list and packed into four bytes each, the form that the index reads, without a Python object each.
#pragma once

#include <charconv>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <string_view>

#include "integers.hpp"

namespace kvrouter {

// Return the packed numbers of a JSON list of integers from 0 to 2^32-1, or nothing if `json` is anything else.
inline std::optional<std::string> packed_numbers(std::string_view json) {
    const char* at = json.data();
    const char* const end = at + json.size();
    const auto skip_space = [&] {
        while (at < end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t')) ++at;
    };
    const auto is_digit = [&] { return at < end && *at >= '0' && *at <= '9'; };
    std::string packed;
    packed.reserve(json.size());  // enough for nearly all lists: most ids have at least three digits
    skip_space();
    if (at == end || *at++ != '[') return std::nullopt;
    skip_space();
    const bool empty = at < end && *at == ']';
    if (empty) ++at;
    for (bool more = !empty; more;) {
        if (!is_digit()) return std::nullopt;
        const bool zero = *at == '0';
        u64 number = 0;
        const char* const first = at;
        for (; is_digit() && at - first < 11; ++at) number = number * 10 + static_cast<u64>(*at - '0');
        if (number > std::numeric_limits<u32>::max() || (zero && at - first > 1)) return std::nullopt;
        const u32 token = static_cast<u32>(number);
        packed.append(reinterpret_cast<const char*>(&token), sizeof(token));
        skip_space();
        if (at == end || (*at != ',' && *at != ']')) return std::nullopt;
        more = *at++ == ',';
        skip_space();
    }
    if (at != end) return std::nullopt;
    return packed;
}

inline u32 packed_number(const char* at) {
    u32 number;
    std::memcpy(&number, at, sizeof(number));
    return number;
}

// Return the size of packed numbers as a JSON list.
inline std::size_t numbers_json_size(std::string_view packed) {
    std::size_t size = packed.empty() ? 2 : 1;
    for (const char* at = packed.data(); at < packed.data() + packed.size(); at += sizeof(u32)) {
        const u32 number = packed_number(at);
        size += 2 + (number >= 10) + (number >= 100) + (number >= 1000) + (number >= 10000);
        if (number >= 100000)
            size += 1 + (number >= 1000000) + (number >= 10000000) + (number >= 100000000) + (number >= 1000000000);
    }
    return size;
}

// Every number of three digits: with zeros before it, and without, followed by any characters.
struct ThreeDigits {
    char padded[1000][4], plain[1000][4];
    u8 length[1000];

    ThreeDigits() {
        for (u32 number = 0; number < 1000; ++number) {
            char* const digits = padded[number];
            digits[0] = static_cast<char>('0' + number / 100);
            digits[1] = static_cast<char>('0' + number / 10 % 10);
            digits[2] = digits[3] = static_cast<char>('0' + number % 10);
            length[number] = number < 10 ? 1 : number < 100 ? 2 : 3;
            std::memset(plain[number], '0', 4);
            std::memcpy(plain[number], digits + 3 - length[number], length[number]);
        }
    }
};

// Write packed numbers as a JSON list of `numbers_json_size`, and return its end.
inline char* write_numbers_json(std::string_view packed, char* to) {
    static const ThreeDigits three;
    constexpr std::size_t most = 10;  // digits
    *to++ = '[';
    for (std::size_t at = 0; at < packed.size(); at += sizeof(u32)) {
        if (at) *to++ = ',';
        const u32 number = packed_number(packed.data() + at);
        if (number >= 1000000 || at + sizeof(u32) == packed.size()) {  // four characters could exceed the last number
            to = std::to_chars(to, to + most, number).ptr;
            continue;
        }
        const u32 thousands = number / 1000, rest = number % 1000;
        if (thousands) {
            std::memcpy(to, three.plain[thousands], 4);
            std::memcpy(to + three.length[thousands], three.padded[rest], 4);
            to += three.length[thousands] + 3;
        } else {
            std::memcpy(to, three.plain[rest], 4);
            to += three.length[rest];
        }
    }
    *to++ = ']';
    return to;
}

}  // namespace kvrouter
