// The choice of a target for one prompt: what each row holds of it, and what it costs there.
// `router/routing/overlaps.py` and `router/policies/linear.py` do the same step by step: they are the specification.
#pragma once

#include <map>
#include <optional>

#include "columns.hpp"
#include "shared_prefixes.hpp"

namespace kvrouter {

// A part of a prompt that several sessions asked for: its end in tokens, and the number of sessions.
struct Asked {
    u64 end;
    double sessions;
};

// The tokens of one prompt that the targets in rows hold.
class HeldRows {
   public:
    // - `held`: each row's tokens, all 0 at first.
    // - `units`: each row's block size in tokens; 0 if it is not known.
    // - `tokens`: the tokens of the prompt, of which the last does not count.
    HeldRows(std::span<u32> held, std::span<const u32> units, u64 tokens) : held_(held), units_(units), tokens_(tokens) {}

    void match(std::span<const Match> matches, u64 block_size, std::span<const i32> row_of) {
        for_better_rows(matches, block_size, row_of, held_, [&](u32 row, u64 cpu, u64 disk) {
            if (cpu > 0 || disk > 0) {
                transfers[row] = {cpu, disk};
            } else {
                transfers.erase(row);
            }
        });
    }

    // Raise rows to the prefixes of prompts in flight, in whole blocks. `tree`: the number of the tree.
    void raise_in_flight(u32 tree, std::span<const std::pair<u32, u32>> longest, u64 chunk, std::span<const i32> row_of) {
        for_rows(tree, longest, chunk, row_of, [&](u32 row, u32 whole) {
            if (whole < held_[row]) return;
            transfers.erase(row);  // the blocks are computed there
            if (whole > held_[row]) raised.push_back(row);
            held_[row] = whole;
        });
    }

    // Raise rows to sent prefixes, in whole blocks, which no event reported.
    void raise_sent(u32 tree, std::span<const std::pair<u32, u32>> longest, u64 chunk, std::span<const i32> row_of) {
        for_rows(tree, longest, chunk, row_of, [&](u32 row, u32 whole) {
            if (whole <= held_[row]) return;
            transfers.erase(row);
            by_events[row] = held_[row];
            held_[row] = whole;
        });
    }

    std::map<u32, std::pair<u64, u64>> transfers;         // by row: the tokens in CPU memory and on disk
    std::map<u32, u32> by_events;                         // by row: the tokens without sent prefixes, where they differ
    std::vector<u32> raised;                              // rows with more tokens in flight than the index has
    std::vector<std::pair<u32, u32>> left;                // tree and holder: its row, or the unit of that, is not known

   private:
    template <typename Raise>
    void for_rows(
        u32 tree, std::span<const std::pair<u32, u32>> longest, u64 chunk, std::span<const i32> row_of, const Raise& raise) {
        if (tokens_ == 0) return;
        for (const auto& [holder, chunks] : longest) {
            const i32 row = holder < row_of.size() ? row_of[holder] : -2;
            if (row == -1) continue;
            const u32 unit = row >= 0 && static_cast<std::size_t>(row) < held_.size() ? units_[row] : 0;
            if (unit == 0) {
                left.emplace_back(tree, holder);
                continue;
            }
            const u64 shared = std::min(chunks * chunk, tokens_ - 1);
            raise(static_cast<u32>(row), static_cast<u32>(shared - shared % unit));
        }
    }

    std::span<u32> held_;
    std::span<const u32> units_;
    u64 tokens_;
};

// The cost of a prompt as a line over its uncached tokens (`LinearPolicy`).
struct CostLines {
    const double *fixed, *per_token, *shares;
    i64 tokens, least;
    double cpu_token, disk_token, near;
};

// The parts for which other sessions pay (`SharedTokens`).
struct PaidParts {
    std::vector<u32> depths;
    std::vector<double> others;

    // Divide the price of parts between the sessions that asked for them (`SharedTokens.paid`). `spare`: 0 to 1.
    void divide(std::span<const Asked> asked, std::span<const u32> held, double spare) {
        constexpr u64 tolerance = 256;
        for (const auto& [end, sessions] : asked) {
            const u32 whole = static_cast<u32>(end > tolerance ? end - tolerance : 0);
            const double share = 1 - (holders(held, whole) + 1) / sessions;
            if (share <= 0) continue;
            depths.push_back(static_cast<u32>(end));
            others.push_back(spare * share);
        }
    }
};

// Return the rows with the lowest costs, as `lowest_rows` does, without the `excluded` ones.
inline std::vector<u32> cheapest_rows(
    const CostLines& lines, std::span<const u32> held, const std::map<u32, std::pair<u64, u64>>& transfers,
    const PaidParts& parts, std::span<const u32> excluded) {
    const std::size_t rows = held.size();
    thread_local std::vector<double> costs;
    thread_local std::vector<u32> paid;
    costs.resize(rows);
    const u32* counted = held.data();
    if (!parts.depths.empty()) {
        paid.resize(rows);
        write_paid(counted, lines.shares, parts.depths, parts.others.data(), paid);
        counted = paid.data();
    }
    write_costs(lines.fixed, lines.per_token, counted, lines.tokens, lines.least, costs);
    for (const auto& [row, outside] : transfers) {
        const auto uncached = static_cast<double>(std::max(lines.tokens - i64{counted[row]}, lines.least));
        const double loads = lines.cpu_token * static_cast<double>(outside.first) + lines.disk_token * static_cast<double>(outside.second);
        costs[row] = lines.fixed[row] + loads + uncached * lines.per_token[row];
    }
    for (const u32 row : excluded)
        if (row < rows) costs[row] = std::numeric_limits<double>::infinity();
    return lowest_rows(costs, lines.near);
}

}  // namespace kvrouter
