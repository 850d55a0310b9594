// Matches of a prompt, from its path in the tree (indexer/reference/index.py).
#pragma once

#include <numeric>
#include <span>

#include "holdings.hpp"

namespace kvrouter {

// The blocks of a prompt that one target holds, each counted in the fastest tier that has it.
struct Match {
    u32 target;
    u32 blocks;
    u32 tiers[kTiers];
};

// A number that no tier has.
inline constexpr u32 kEveryTier = kTiers;

// The prefix hashes of a prompt, computed on demand.
class PromptHashes {
   public:
    // `known`: the hashes that were computed before. `block_size` is in tokens.
    PromptHashes(u64 root, u64 block_size, std::string_view tokens, std::vector<u64> known)
        : root_(root), step_(block_size * sizeof(u32)), tokens_(tokens), hashes_(std::move(known)),
          known_(hashes_.size()) {}

    u64 operator[](std::size_t block) {
        while (hashes_.size() <= block) {
            const u64 before = hashes_.empty() ? root_ : hashes_.back();
            hashes_.push_back(xxh3::hash(tokens_.data() + hashes_.size() * step_, step_, before));
        }
        return hashes_[block];
    }

    // Return the hashes that were known or computed so far.
    std::span<const u64> all() const { return hashes_; }

    // Return the hashes beyond the known ones.
    std::string_view made() const {
        return {reinterpret_cast<const char*>(hashes_.data() + known_), (hashes_.size() - known_) * sizeof(u64)};
    }

   private:
    u64 root_;
    std::size_t step_;
    std::string_view tokens_;
    std::vector<u64> hashes_;
    std::size_t known_;
};

// Follower of targets along the runs of a prompt. For one prompt at a time; the caller has the turn.
class Matcher {
   public:
    explicit Matcher(Shared& shared) : shared_(shared) {}

    // Return the matches of a prompt's first `limit` blocks. `only`: the tier whose blocks count, or kEveryTier.
    void match(PromptHashes& hashes, std::size_t limit, std::vector<Match>& matches, u32 only = kEveryTier) {
        only_ = only;
        followers_.clear();
        records_.clear();
        ++epoch_;
        u32 run = kRoot;
        std::size_t done = 0;
        bool anybody = true;
        while (done < limit && anybody) {
            run = shared_.tree.child(run, hashes[done]);
            if (run == kRoot) break;
            const Run& here = shared_.tree.run(run);
            const std::size_t most = std::min<std::size_t>(here.size, limit - done);
            u32 count = 1;
            while (count < most && here.hashes[count] == hashes[done + count]) ++count;
            anybody = follow(here, count, done == 0);
            done += count;
        }
        for (Follower& each : followers_) {
            const Standing& standing = shared_.standings[each.holder];
            if (standing.hybrid && each.blocks > 0) settle_hybrid(each);
            if (each.blocks > 0)
                matches.push_back({standing.target, each.blocks, {each.tiers[0], each.tiers[1], each.tiers[2], each.tiers[3]}});
        }
    }

   private:
    using Bits = std::array<u64, Held::kWords>;

    struct Follower {
        explicit Follower(u32 holder) : holder(holder) {}

        u32 holder;  // any holder of the target
        u32 blocks = 0;
        u32 tiers[kTiers] = {};
        u64 span = 0;              // the last span with blocks of the target, counted from 1
        u64 reached = 0;           // the last span that the target holds whole
        u32 first = 0, count = 0;  // the target's holders in that span
        u32 last_record = kNobody;
    };

    struct Share {
        const Held* held;
        u32 next;  // the next one of the same follower
    };

    // The blocks of a hybrid target in one span.
    struct Record {
        u32 before;  // the previous one of the same follower
        u32 reach;
        std::vector<std::pair<const Holder*, Held>> held;
    };

    // Follow the targets through the next span. Returns false if none matches all of it.
    bool follow(const Run& run, u32 count, bool first) {
        ++span_;
        shares_.clear();
        for (u32 index = 0; index < run.held_count; ++index) {
            const Held& held = run.held[index];
            const Standing& standing = shared_.standings[held.holder];
            if (!standing.alive || (only_ != kEveryTier && only_ != standing.tier)) continue;
            if (slots_.size() <= standing.target) slots_.resize(standing.target + 1);
            Slot& slot = slots_[standing.target];
            if (slot.epoch != epoch_) {
                if (!first) continue;
                slot = {epoch_, static_cast<u32>(followers_.size())};
                followers_.emplace_back(held.holder);
            }
            Follower& follower = followers_[slot.follower];
            if (!first && follower.reached + 1 != span_) continue;
            if (follower.span != span_) follower.span = span_, follower.count = 0;
            shares_.push_back({&held, follower.first});
            follower.first = static_cast<u32>(shares_.size() - 1);
            ++follower.count;
        }
        if (first) {
            following_.resize(followers_.size());
            std::iota(following_.begin(), following_.end(), 0);
        }
        std::erase_if(following_, [&](u32 number) {
            Follower& each = followers_[number];
            if (each.span != span_) each.count = 0;
            if (reach(each, count) < count) return true;
            each.reached = span_;
            return false;
        });
        return !following_.empty();
    }

    const Holder* holder_of(const Share& share) const { return shared_.holders[share.held->holder].get(); }

    const Holdings& owner_of(const Follower& follower) const { return *shared_.holders[follower.holder]->owner; }

    // Return and count the blocks of a span that a follower holds without a gap.
    u32 reach(Follower& follower, u32 count) {
        if (shared_.standings[follower.holder].hybrid) return reach_hybrid(follower, count);
        if (follower.count == 0) return 0;
        if (follower.count == 1) {
            const Share& share = shares_[follower.first];
            const u32 reach = std::min<u32>(share.held->lead, count);
            follower.tiers[shared_.standings[share.held->holder].tier] += reach;
            follower.blocks += reach;
            return reach;
        }
        held_.clear();
        for (u32 left = follower.count, at = follower.first; left > 0; --left, at = shares_[at].next)
            held_.emplace_back(holder_of(shares_[at]), *shares_[at].held);
        Bits any{};
        for (const auto& [holder, held] : held_)
            for (u32 word = 0; word < Held::kWords; ++word) any[word] |= held.word(word);
        const u32 reach = leading(any, count);
        count_tiers(follower, held_, reach);
        follower.blocks += reach;
        return reach;
    }

    u32 reach_hybrid(Follower& follower, u32 count) {
        Record record{follower.last_record, 0, {}};
        for (u32 left = follower.count, at = follower.first; left > 0; --left, at = shares_[at].next)
            record.held.emplace_back(holder_of(shares_[at]), *shares_[at].held);
        Bits common;
        common.fill(~u64{0});
        bool any_group = false;
        for (const Holder* one : owner_of(follower).holders()) {
            if (one->windowed) continue;
            Bits bits{};
            bool seen = false;
            for (const auto& [holder, held] : record.held) {
                if (holder->windowed || !(holder->group == one->group)) continue;
                seen = true;
                for (u32 word = 0; word < Held::kWords; ++word) bits[word] |= held.word(word);
            }
            if (!owner_of(follower).counts(one->group, seen)) continue;
            any_group = true;
            for (u32 word = 0; word < Held::kWords; ++word) common[word] &= bits[word];
        }
        record.reach = any_group ? leading(common, count) : 0;
        follower.blocks += record.reach;
        follower.last_record = static_cast<u32>(records_.size());
        records_.push_back(std::move(record));
        return records_.back().reach;
    }

    // Shorten a hit to the longest one after which every window group has its last blocks, and count its tiers.
    void settle_hybrid(Follower& follower) {
        std::vector<const Record*> trail;
        for (u32 at = follower.last_record; at != kNobody; at = records_[at].before) trail.push_back(&records_[at]);
        std::reverse(trail.begin(), trail.end());
        std::vector<bool> possible(follower.blocks + 1, true);
        std::vector<std::pair<Integer, u64>> windows;  // by group; the last holder of a group defines it, as in Python
        for (const Holder* holder : owner_of(follower).holders()) {
            if (!holder->windowed) continue;
            const auto known = std::find_if(
                windows.begin(), windows.end(), [&](const auto& each) { return each.first == holder->group; });
            if (known == windows.end()) {
                windows.emplace_back(holder->group, holder->window);
            } else {
                known->second = holder->window;
            }
        }
        for (const auto& [group, window] : windows) {
            std::vector<bool> live(follower.blocks, false);
            bool seen = false;
            u32 before = 0;
            for (const Record* record : trail) {
                for (const auto& [holder, held] : record->held) {
                    if (!(holder->group == group)) continue;
                    seen = true;
                    for (u32 block = 0; block < record->reach; ++block)
                        if (held.has(block)) live[before + block] = true;
                }
                before += record->reach;
            }
            if (!owner_of(follower).counts(group, seen)) continue;
            u64 run = 0;  // live blocks up to here; a hit shorter than the window needs only what there is
            for (u32 blocks = 1; blocks <= follower.blocks; ++blocks) {
                run = live[blocks - 1] ? run + 1 : 0;
                if (run < std::min<u64>(window, blocks)) possible[blocks] = false;
            }
        }
        while (!possible[follower.blocks]) --follower.blocks;
        u32 left = follower.blocks;
        for (const Record* record : trail) {
            const u32 matched = std::min(record->reach, left);
            left -= matched;
            count_tiers(follower, record->held, matched);
        }
    }

    // Count a span's matched blocks in the fastest tier that has each.
    static void count_tiers(Follower& follower, std::vector<std::pair<const Holder*, Held>> held, u32 matched) {
        if (held.size() == 1) {
            follower.tiers[held[0].first->tier] += matched;
            return;
        }
        std::stable_sort(
            held.begin(), held.end(), [](const auto& one, const auto& other) { return one.first->tier < other.first->tier; });
        Bits left{};
        for (u32 block = 0; block < matched; ++block) left[block / 64] |= u64{1} << block % 64;
        for (const auto& [holder, mine] : held) {
            if (holder->windowed) continue;
            for (u32 word = 0; word < Held::kWords; ++word) {
                follower.tiers[holder->tier] += static_cast<u32>(std::popcount(mine.word(word) & left[word]));
                left[word] &= ~mine.word(word);
            }
        }
    }

    static u32 leading(const Bits& bits, u32 count) {
        u32 word = 0;
        while (word < Held::kWords && bits[word] == ~u64{0}) ++word;
        const u32 ones = word == Held::kWords ? kRunBlocks : word * 64 + static_cast<u32>(std::countr_one(bits[word]));
        return std::min(ones, count);
    }

    struct Slot {
        u64 epoch = 0;
        u32 follower = 0;
    };

    Shared& shared_;
    u64 epoch_ = 0;
    u64 span_ = 0;
    u32 only_ = kEveryTier;
    std::vector<Slot> slots_;  // by target
    std::vector<Follower> followers_;
    std::vector<u32> following_;  // the targets that hold all blocks so far
    std::vector<Share> shares_;
    std::vector<Record> records_;
    std::vector<std::pair<const Holder*, Held>> held_;
};

}  // namespace kvrouter
