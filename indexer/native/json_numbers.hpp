// Packs a JSON list of token ids into four bytes each, the form that the index reads, without a Python object for each.
#pragma once

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

}  // namespace kvrouter
