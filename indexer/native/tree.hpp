// The radix tree of prefix hashes, which all targets share (described in indexer/reference/tree.py).
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cstdlib>
#include <deque>
#include <memory>
#include <new>
#include <vector>

#include "msgpack.hpp"

namespace kvrouter {

inline constexpr u32 kRunBlocks = 1024;
inline constexpr u32 kRoot = 0;
inline constexpr u32 kNobody = ~u32{0};

// Return a number's bits mixed over 64 bits.
inline u64 mixed(u64 x) {
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ULL;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ULL;
    return x ^ x >> 32;
}

inline void* allocated(void* old, std::size_t bytes) {
    void* memory = std::realloc(old, bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

// The blocks of a run that a holder has: the first `lead` ones, and a bit per block if there are any behind a gap.
struct Held {
    u32 holder;
    u16 lead;
    u64* bits;  // kWords words for all blocks of the run; null if no block is held behind a gap

    static constexpr u32 kWords = kRunBlocks / 64;

    bool has(u32 offset) const { return bits == nullptr ? offset < lead : bits[offset / 64] >> offset % 64 & 1; }

    u64 word(u32 index) const {
        if (bits != nullptr) return bits[index];
        const u32 before = index * 64;
        return lead >= before + 64 ? ~u64{0} : lead > before ? (u64{1} << (lead - before)) - 1 : 0;
    }

    // Return the number of blocks up to the last held one.
    u32 end() const {
        if (bits == nullptr) return lead;
        for (u32 index = kWords; index-- > 0;)
            if (bits[index] != 0) return index * 64 + static_cast<u32>(std::bit_width(bits[index]));
        return 0;
    }

    bool has_any(u32 start, u32 count) const {
        if (bits == nullptr) return start < lead;
        for (u32 offset = start; offset < start + count; ++offset)
            if (has(offset)) return true;
        return false;
    }

    void add(u32 start, u32 count) {
        if (bits == nullptr && start <= lead) {
            lead = static_cast<u16>(std::max<u32>(lead, start + count));
            return;
        }
        spread();
        for (u32 offset = start; offset < start + count; ++offset) bits[offset / 64] |= u64{1} << offset % 64;
        gather();
    }

    void take(u32 offset) {
        if (bits == nullptr && offset + 1u == lead) {
            --lead;
            return;
        }
        spread();
        bits[offset / 64] &= ~(u64{1} << offset % 64);
        gather();
    }

   private:
    void spread() {
        if (bits != nullptr) return;
        auto* words = static_cast<u64*>(allocated(nullptr, kWords * sizeof(u64)));
        for (u32 index = 0; index < kWords; ++index) words[index] = word(index);
        bits = words;
    }

    // Find the first gap, and free the bits if no block is held behind it.
    void gather() {
        u32 index = 0;
        while (index < kWords && bits[index] == ~u64{0}) ++index;
        lead = static_cast<u16>(kRunBlocks);
        if (index < kWords) {
            const u32 ones = static_cast<u32>(std::countr_one(bits[index]));
            lead = static_cast<u16>(index * 64 + ones);
            if (bits[index] >> ones != 0) return;
            while (++index < kWords)
                if (bits[index] != 0) return;
        }
        std::free(bits);
        bits = nullptr;
    }
};

// Consecutive blocks of one prefix, one prefix hash each. `depth` counts the blocks before the first.
struct Run {
    u64* hashes;
    Held* held;  // by holder
    u32* children_at;  // for a run with many children: their number by the block that they follow
    u16 size, room;
    u32 held_count, held_room;
    u32 parent, depth;
    u32 first_child, next, previous;  // next, previous: the siblings
    u32 children;
};

struct Span {
    u32 run, start, count;
};

class PrefixTree {
   public:
    explicit PrefixTree(u64 seed) : seed_(seed) { run(make()) = {}; }
    PrefixTree(const PrefixTree&) = delete;
    PrefixTree& operator=(const PrefixTree&) = delete;
    ~PrefixTree() {
        for (u32 number = 0; number < end_; ++number) discard(run(number));
        for (auto& shard : shards_) std::free(shard.slots);
    }

    std::size_t size() const { return count_ - 1; }  // without the root

    Run& run(u32 number) { return chunks_[number / kChunk][number % kChunk]; }
    const Run& run(u32 number) const { return chunks_[number / kChunk][number % kChunk]; }

    // Return the child of a run that begins with a hash, or the root if it has no child like that.
    u32 child(u32 parent, u64 first_hash) const {
        const u32 tag = tag_of(parent, first_hash);
        const Shard& shard = shards_[tag >> kShardShift];
        for (u32 slot = tag & shard.mask; shard.slots != nullptr; slot = (slot + 1) & shard.mask) {
            const u64 entry = shard.slots[slot];
            if (entry == 0) break;
            if (entry >> 32 != tag) continue;
            const Run& found = run(static_cast<u32>(entry));
            if (found.parent == parent && found.hashes[0] == first_hash) return static_cast<u32>(entry);
        }
        return kRoot;
    }

    // Find or add the first of some blocks after block `offset` of a run (-1: after the root).
    // Returns a span of as many of them as one run takes.
    Span insert(u32 number, std::int64_t offset, const u64* hashes, std::size_t count) {
        u32 start = static_cast<u32>(offset + 1);
        for (;;) {
            Run& here = run(number);
            if (start < here.size && here.hashes[start] == hashes[0]) {
                const u32 most = static_cast<u32>(std::min<std::size_t>(here.size - start, count));
                u32 same = 1;
                while (same < most && here.hashes[start + same] == hashes[same]) ++same;
                return {number, start, same};
            }
            if (here.children > 0 || number == kRoot) {
                if (const u32 found = child(number, hashes[0]); found != kRoot) {
                    number = found;
                    start = 0;
                    continue;
                }
            }
            if (number == kRoot || start < here.size || start == kRunBlocks) {
                number = branch(number, start, hashes[0]);
                start = 0;
            }
            const u32 added = static_cast<u32>(std::min<std::size_t>(count, kRunBlocks - start));
            append(run(number), hashes, added);
            return {number, start, added};
        }
    }

    // Return the blocks of a run that a holder has; null if it has none.
    Held* held(u32 number, u32 holder) {
        Run& here = run(number);
        Held* found = std::lower_bound(here.held, here.held + here.held_count, holder, before);
        return found < here.held + here.held_count && found->holder == holder ? found : nullptr;
    }

    Held& held_or_new(u32 number, u32 holder) {
        Run& here = run(number);
        Held* found = std::lower_bound(here.held, here.held + here.held_count, holder, before);
        if (found < here.held + here.held_count && found->holder == holder) return *found;
        const auto at = found - here.held;
        if (here.held_count == here.held_room) {
            const u32 room = here.held_room + here.held_room / 2 + 1;
            here.held = static_cast<Held*>(allocated(here.held, room * sizeof(Held)));
            here.held_room = room;
        }
        found = here.held + at;
        std::move_backward(found, here.held + here.held_count, here.held + here.held_count + 1);
        ++here.held_count;
        *found = {holder, 0, nullptr};
        return *found;
    }

    // Remove a holder from one block, and free the blocks without holders.
    void vacate(u32 number, u32 offset, u32 holder) {
        Held* mine = held(number, holder);
        assert(mine != nullptr && mine->has(offset));
        mine->take(offset);
        const bool left = mine->lead > 0 || mine->bits != nullptr;
        if (!left) forget(run(number), mine);
        if (!left || offset + 1u == run(number).size) release(number);
    }

    // Remove a holder from a whole run. A run that the holder has left may be reused already.
    void vacate_all(u32 number, u32 holder) {
        Held* mine = number < end_ ? held(number, holder) : nullptr;
        if (mine == nullptr) return;
        forget(run(number), mine);
        release(number);
    }

    // Free the blocks at the end of a run that no target holds. If none is left, free the run and its parents.
    void release(u32 number) {
        while (number != kRoot && run(number).parent != kNobody) {
            Run& here = run(number);
            u32 needed = 0;
            for (u32 index = 0; index < here.held_count && needed < here.size; ++index)
                needed = std::max(needed, here.held[index].end());
            if (needed < here.size) needed = std::max(needed, last_branch(here));
            if (needed > 0) {
                if (needed < here.size) shorten(here, needed);
                return;
            }
            const u32 parent = here.parent;
            unlink(number);
            discard(here);
            here = {};
            here.parent = kNobody;
            here.next = free_;
            free_ = number;
            --count_;
            number = parent;
        }
    }

    // Return whether a holder has a child of this block.
    bool is_followed(u32 number, u32 offset, u32 holder) {
        const Held* mine = held(number, holder);
        if (offset + 1 < kRunBlocks && mine != nullptr && mine->has(offset + 1)) return true;
        const Run& here = run(number);
        if (here.children > kLookedAt) return true;  // a block with this many children is in use
        for (u32 child = here.first_child; child != kRoot; child = run(child).next) {
            if (run(child).depth != here.depth + offset + 1) continue;
            const Held* theirs = held(child, holder);
            if (theirs != nullptr && theirs->has(0)) return true;
        }
        return false;
    }

    // Return whether the invariants hold (for tests).
    bool is_sound() const {
        std::size_t seen = 0, in_shards = 0;
        for (u32 number = 1; number < end_; ++number) {
            const Run& here = run(number);
            if (here.parent == kNobody) continue;
            ++seen;
            const Run& parent = run(here.parent);
            if (here.size == 0 || here.size > kRunBlocks || here.size > here.room) return false;
            if (here.held_count == 0 && here.children == 0) return false;  // a run without holders and children
            if (child(here.parent, here.hashes[0]) != number) return false;
            if (here.parent != kRoot && (here.depth < parent.depth || here.depth > parent.depth + parent.size))
                return false;
            u32 children = 0, needed = 0;
            for (u32 each = here.first_child; each != kRoot; each = run(each).next, ++children) {
                if (run(each).parent != number) return false;
                needed = std::max(needed, run(each).depth - here.depth);
            }
            if (children != here.children || needed != last_branch(here)) return false;
            for (u32 index = 0; index < here.held_count; ++index) {
                const Held& mine = here.held[index];
                if (mine.end() == 0 || mine.end() > here.size) return false;
                if (index > 0 && here.held[index - 1].holder >= mine.holder) return false;
                needed = std::max(needed, mine.end());
            }
            if (needed != here.size) return false;
        }
        for (const Shard& shard : shards_) in_shards += shard.used;
        return seen == size() && in_shards == seen;
    }

   private:
    // First hashes of runs by their parents: open addressing, in shards so that none takes long to grow.
    struct Shard {
        u64* slots = nullptr;  // a tag and a run each; 0 is free
        u32 mask = 0, used = 0;
    };

    static constexpr u32 kChunk = 4096;
    static constexpr int kShardShift = 24;  // the upper bits of a tag choose the shard, the lower ones the slot
    static constexpr u32 kLookedAt = 64;    // children; indexer/reference/holdings.py has the same limit
    static constexpr u32 kManyChildren = 16;

    static bool before(const Held& held, u32 holder) { return held.holder < holder; }

    u32 tag_of(u32 parent, u64 hash) const {
        return static_cast<u32>(mixed(hash ^ seed_ ^ static_cast<u64>(parent) << 21) >> 16);
    }

    u32 make() {
        ++count_;
        if (free_ != kNobody) {
            const u32 number = free_;
            free_ = run(number).next;
            return number;
        }
        if (end_ == chunks_.size() * kChunk) chunks_.push_back(std::make_unique<Run[]>(kChunk));
        return end_++;
    }

    u32 branch(u32 parent, u32 start, u64 first_hash) {
        const u32 number = make();
        Run& here = run(number);
        here = {};
        here.parent = parent;
        here.depth = run(parent).depth + start;
        here.hashes = static_cast<u64*>(allocated(nullptr, sizeof(u64)));
        here.hashes[0] = first_hash;  // `append` writes it again
        here.room = 1;
        link(number, tag_of(parent, first_hash));
        if (parent == kRoot) return number;
        Run& above = run(parent);
        here.next = above.first_child;
        if (here.next != kRoot) run(here.next).previous = number;
        above.first_child = number;
        ++above.children;
        if (above.children_at != nullptr) {
            ++above.children_at[start];
        } else if (above.children == kManyChildren) {
            above.children_at = static_cast<u32*>(allocated(nullptr, (kRunBlocks + 1) * sizeof(u32)));
            std::fill_n(above.children_at, kRunBlocks + 1, 0);
            for (u32 each = above.first_child; each != kRoot; each = run(each).next)
                ++above.children_at[run(each).depth - above.depth];
        }
        return number;
    }

    void unlink(u32 number) {
        const Run& here = run(number);
        const u32 tag = tag_of(here.parent, here.hashes[0]);
        Shard& shard = shards_[tag >> kShardShift];
        const u64 entry = static_cast<u64>(tag) << 32 | number;
        u32 hole = tag & shard.mask;
        while (shard.slots[hole] != entry) hole = (hole + 1) & shard.mask;
        for (u32 slot = (hole + 1) & shard.mask; shard.slots[slot] != 0; slot = (slot + 1) & shard.mask) {
            const u32 home = static_cast<u32>(shard.slots[slot] >> 32) & shard.mask;
            if (((slot - home) & shard.mask) < ((slot - hole) & shard.mask)) continue;
            shard.slots[hole] = shard.slots[slot];
            hole = slot;
        }
        shard.slots[hole] = 0;
        if (--shard.used < shard.mask / 8 && shard.mask > kSmallShard) resize(shard, shard.mask / 4);
        if (here.parent == kRoot) return;
        Run& above = run(here.parent);
        (here.previous == kRoot ? above.first_child : run(here.previous).next) = here.next;
        if (here.next != kRoot) run(here.next).previous = here.previous;
        --above.children;
        if (above.children_at == nullptr) return;
        --above.children_at[here.depth - above.depth];
        if (above.children > kManyChildren / 2) return;
        std::free(above.children_at);
        above.children_at = nullptr;
    }

    static constexpr u32 kSmallShard = 15;

    void link(u32 number, u32 tag) {
        Shard& shard = shards_[tag >> kShardShift];
        if (shard.slots == nullptr || (shard.used + 1) * 4 > (shard.mask + 1) * 3) {
            resize(shard, shard.slots == nullptr ? kSmallShard : shard.mask * 2 + 1);
        }
        put(shard, static_cast<u64>(tag) << 32 | number);
        ++shard.used;
    }

    static void put(Shard& shard, u64 entry) {
        u32 slot = static_cast<u32>(entry >> 32) & shard.mask;
        while (shard.slots[slot] != 0) slot = (slot + 1) & shard.mask;
        shard.slots[slot] = entry;
    }

    static void resize(Shard& shard, u32 mask) {
        mask |= kSmallShard;
        u64* old = shard.slots;
        const u32 slots = old == nullptr ? 0 : shard.mask + 1;
        shard.slots = static_cast<u64*>(std::calloc(mask + 1, sizeof(u64)));
        if (shard.slots == nullptr) throw std::bad_alloc();
        shard.mask = mask;
        for (u32 slot = 0; slot < slots; ++slot)
            if (old[slot] != 0) put(shard, old[slot]);
        std::free(old);
    }

    // The number of blocks before the last branch.
    u32 last_branch(const Run& here) const {
        u32 last = 0;
        if (here.children_at != nullptr) {
            for (last = here.size; here.children_at[last] == 0;) --last;
        } else {
            for (u32 child = here.first_child; child != kRoot; child = run(child).next)
                last = std::max(last, run(child).depth - here.depth);
        }
        return last;
    }

    static void append(Run& here, const u64* hashes, u32 count) {
        if (here.size + count > here.room) {
            // Runs that grow block by block get a quarter more.
            const u32 room = std::min(kRunBlocks, here.size + std::max<u32>(count, here.size / 4));
            here.hashes = static_cast<u64*>(allocated(here.hashes, room * sizeof(u64)));
            here.room = static_cast<u16>(room);
        }
        std::copy_n(hashes, count, here.hashes + here.size);
        here.size = static_cast<u16>(here.size + count);
    }

    static void shorten(Run& here, u32 size) {
        here.size = static_cast<u16>(size);
        if (here.room < 2 * size + 8) return;
        here.hashes = static_cast<u64*>(allocated(here.hashes, size * sizeof(u64)));
        here.room = here.size;
    }

    static void forget(Run& here, Held* mine) {
        std::free(mine->bits);
        std::move(mine + 1, here.held + here.held_count, mine);
        --here.held_count;
        if (here.held_count > 0 || here.held == nullptr) return;
        std::free(here.held);
        here.held = nullptr;
        here.held_room = 0;
    }

    static void discard(Run& here) {
        for (u32 index = 0; index < here.held_count; ++index) std::free(here.held[index].bits);
        std::free(here.held);
        std::free(here.hashes);
        std::free(here.children_at);
    }

    u64 seed_;
    std::vector<std::unique_ptr<Run[]>> chunks_;
    std::array<Shard, 256> shards_{};
    std::size_t count_ = 0;
    u32 end_ = 0;
    u32 free_ = kNobody;
};

}  // namespace kvrouter
