// Targets in rows: the tokens of a prompt that each holds, and the cost of the prompt there.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>
#include <string_view>
#include <vector>

#include "matching.hpp"

namespace kvrouter {

using i32 = std::int32_t;
using i64 = std::int64_t;

// Write the tokens of matches to rows with fewer tokens. Calls `other` with the tokens in CPU memory and on disk, for the
// rows whose tokens are, or were, partly outside GPU memory.
template <typename Other>
void for_better_rows(
    std::span<const Match> matches, u64 block_size, std::span<const i32> row_of, std::span<u32> tokens, const Other& other) {
    for (const Match& match : matches) {
        const i32 row = match.target < row_of.size() ? row_of[match.target] : -1;
        if (row < 0 || static_cast<std::size_t>(row) >= tokens.size()) continue;
        const u64 found = match.blocks * block_size, before = tokens[row];
        if (found <= before) continue;
        tokens[row] = static_cast<u32>(std::min<u64>(found, ~u32{0}));
        const u64 cpu = match.tiers[1] * block_size, disk = (match.tiers[2] + u64{match.tiers[3]}) * block_size;
        if (before > 0 || cpu > 0 || disk > 0) other(static_cast<u32>(row), cpu, disk);
    }
}

inline void write_costs(
    const double* fixed, const double* per_token, const u32* held, i64 tokens, i64 least, std::span<double> costs) {
    // Doubles hold these integers exactly, and the compiler vectorizes their arithmetic.
    const auto all = static_cast<double>(tokens), fewest = static_cast<double>(least);
    for (std::size_t row = 0; row < costs.size(); ++row)
        costs[row] = fixed[row] + std::max(all - static_cast<double>(held[row]), fewest) * per_token[row];
}

// Return the tokens after the first `held` for which other sessions pay: of those between two `depths`, the share `others`
// of the latter.
inline double paid_after(u32 held, std::span<const u32> depths, const double* others) {
    double tokens = 0;
    for (std::size_t part = 0; part < depths.size(); ++part) {
        if (depths[part] <= held) continue;
        tokens += static_cast<double>(depths[part] - held) * others[part];
        held = depths[part];
    }
    return tokens;
}

// Write each row's cached tokens, and those for which other sessions pay, times the row's `shares` (0 to 1). A prompt has
// less than 2^31 tokens.
inline void write_paid(
    const u32* held, const double* shares, std::span<const u32> depths, const double* others, std::span<u32> paid) {
    for (std::size_t row = 0, end = 0; row < paid.size();) {
        const u32 known = held[row];
        while (end < paid.size() && held[end] == known) ++end;  // most rows hold as many tokens as the next
        const double tokens = paid_after(known, depths, others);
        for (; row < end; ++row) paid[row] = known + static_cast<u32>(static_cast<i32>(shares[row] * tokens));
    }
}

// Return how many rows hold at least `tokens` tokens.
inline u32 holders(std::span<const u32> held, u32 tokens) {
    return static_cast<u32>(std::count_if(held.begin(), held.end(), [tokens](u32 known) { return known >= tokens; }));
}

inline u32 highest(std::span<const u32> column) {
    return column.empty() ? 0 : *std::max_element(column.begin(), column.end());
}

// Return the lowest cost; infinity for no rows. Its four chains of comparisons do not wait for each other.
inline double lowest_cost(std::span<const double> costs) {
    constexpr std::size_t chains = 4;
    std::array<double, chains> lowest;
    lowest.fill(std::numeric_limits<double>::infinity());
    std::size_t row = 0;
    for (; row + chains <= costs.size(); row += chains)
        for (std::size_t chain = 0; chain < chains; ++chain) lowest[chain] = std::min(lowest[chain], costs[row + chain]);
    for (; row < costs.size(); ++row) lowest[0] = std::min(lowest[0], costs[row]);
    return *std::min_element(lowest.begin(), lowest.end());
}

// Return the rows whose finite cost exceeds the lowest by at most the share `near`.
inline std::vector<u32> lowest_rows(std::span<const double> costs, double near) {
    std::vector<u32> rows;
    const double lowest = lowest_cost(costs);
    if (std::isinf(lowest)) return rows;
    const double most = near > 0 ? lowest * (1 + near) : lowest;
    for (std::size_t row = 0; row < costs.size(); ++row)
        if (costs[row] <= most) rows.push_back(static_cast<u32>(row));
    return rows;
}

}  // namespace kvrouter
