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

// Return packed numbers as a JSON list.
inline std::string numbers_json(std::string_view packed) {
    constexpr std::size_t most = 11;  // characters of a number and a comma
    const std::size_t count = packed.size() / sizeof(u32);
    std::string json(2 + most * count, '[');
    char* at = json.data() + 1;
    for (std::size_t number = 0; number < count; ++number) {
        u32 token;
        std::memcpy(&token, packed.data() + number * sizeof(token), sizeof(token));
        at = std::to_chars(at, at + most, token).ptr;
        *at++ = ',';
    }
    if (count) --at;
    *at++ = ']';
    json.resize(static_cast<std::size_t>(at - json.data()));
    return json;
}

}  // namespace kvrouter
