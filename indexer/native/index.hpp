// The index: which target holds which prefix. All methods are thread-safe and need no lock of Python's.
#pragma once

#include <random>
#include <span>

#include "dump.hpp"
#include "matching.hpp"

namespace kvrouter {

struct RejectedEvent {
    u32 index;
    std::string reason;
};

// The outcome of one batch. If `foreign` is not empty, nothing was applied: the caller decodes those events and applies
// the batch again with them.
struct Applied {
    bool is_batch = true;
    bool cleared = false;  // the batch cleared the whole cache, perhaps before further events
    bool new_block_size = false;
    std::vector<RejectedEvent> rejected;
    std::vector<std::pair<u32, std::string_view>> foreign;  // number and bytes of events of unknown kinds

    // Return whether the caller must look at this outcome.
    bool tells() const { return !is_batch || cleared || new_block_size || !rejected.empty() || !foreign.empty(); }
};

class Index {
   public:
    // - `secret`: the secret of the prefix hashes.
    // - `orphan_blocks`: maximum number of a target's blocks that wait for their parent.
    // - `most_blocks`: maximum number of blocks that one target may hold.
    Index(std::string secret, std::size_t orphan_blocks, u64 most_blocks)
        : shared_(std::move(secret), random_seed(), orphan_blocks, most_blocks), matcher_(shared_) {}

    // Register a target and return its number. The number is reused once the target is dropped.
    u32 add(std::string model, std::string tenant, std::optional<std::string> adapter, std::optional<u64> capacity) {
        auto holdings = std::make_shared<Holdings>(
            shared_, std::move(model), std::move(tenant), std::move(adapter), capacity);
        const std::lock_guard guard(targets_lock_);
        const auto free = std::find_if(targets_.begin(), targets_.end(), [](const Target& each) { return !each.holdings; });
        holdings->number = static_cast<u32>(free - targets_.begin());
        Target target{std::move(holdings), {}};
        if (free == targets_.end()) {
            targets_.push_back(std::move(target));
            return static_cast<u32>(targets_.size() - 1);
        }
        *free = std::move(target);
        return static_cast<u32>(free - targets_.begin());
    }

    // Let a target's events report the chain and the blocks of a pool.
    void attach(u32 number, std::shared_ptr<PoolBlocks> pool) {
        change(holdings(number), [&](Holdings& holdings) { holdings.pool = std::move(pool); });
    }

    // Apply a batch of events to a target.
    // - `known`: the batch's foreign events that the caller could decode, by number; null on the first attempt. Foreign
    //   events that are not in this list are skipped.
    // - `trusted`: passed to `Decoder`.
    Applied apply(u32 number, std::string_view payload, const std::vector<std::pair<u32, std::string>>* known, bool trusted) {
        return apply(holdings(number), payload, known, trusted);
    }

    // Return a target's holdings, or null if it is not registered. Holdings of a dropped target ignore later changes:
    // they cannot affect another target with the same number.
    std::shared_ptr<Holdings> holdings(u32 number) {
        const std::lock_guard guard(targets_lock_);
        return number < targets_.size() ? targets_[number].holdings : nullptr;
    }

    struct Addressed {
        std::shared_ptr<Holdings> holdings;
        std::string_view payload;
    };

    // Apply batches until one must be reported to the caller. Return the number of batches applied, that one included;
    // `last` receives the outcome of the last one.
    std::size_t apply_all(std::span<const Addressed> batches, Applied& last) {
        for (std::size_t place = 0; place < batches.size(); ++place) {
            last = apply(batches[place].holdings, batches[place].payload, nullptr, false);
            if (last.tells()) return place + 1;
        }
        return batches.size();
    }

    void clear(u32 number) {
        change(holdings(number), [&](Holdings& holdings) {
            const std::lock_guard turn(shared_.lock);
            holdings.clear();
            shared_.sweep(kSweepBlocks);
        });
    }

    void drop(u32 number) {
        change(holdings(number), [&](Holdings& holdings) {
            const std::lock_guard turn(shared_.lock);
            holdings.drop();
            shared_.sweep(kSweepBlocks);
        });
        const std::lock_guard guard(targets_lock_);
        if (number < targets_.size()) targets_[number] = {};
    }

    // Return the targets that hold at least one of a prompt's first `limit` blocks, in tier `only` or in any tier.
    std::vector<Match> match(PromptHashes& hashes, std::size_t limit, u32 only = kEveryTier) {
        std::vector<Match> matches;
        const std::lock_guard turn(shared_.lock);
        matcher_.match(hashes, limit, matches, only);
        return matches;
    }

    std::string dump(u32 number) {
        std::string bytes;
        change(holdings(number), [&](Holdings& holdings) { bytes = kvrouter::dump(holdings, shared_); });
        return bytes;
    }

    // Restore an empty target from a dump. Return false if the dump is invalid; the target then stays empty.
    bool restore(u32 number, std::string_view bytes, const std::vector<u64>& block_sizes) {
        bool restored = false;
        change(holdings(number), [&](Holdings& holdings) {
            for (const u64 size : block_sizes) holdings.know_block_size(size);
            restored = Restoring(holdings, shared_, bytes).restore();
            const std::lock_guard turn(shared_.lock);
            if (restored) return;
            holdings.clear();
            shared_.sweep(kSweepBlocks);
        });
        return restored;
    }

    std::optional<Status> status(u32 number) {
        const std::lock_guard guard(targets_lock_);
        if (number >= targets_.size() || !targets_[number].holdings) return std::nullopt;
        return targets_[number].status;
    }

    // The blocks of a target in GPU memory, and those that its events have removed; zeros for an unknown target.
    std::pair<u64, u64> kept(u32 number) {
        const std::lock_guard guard(targets_lock_);
        if (number >= targets_.size() || !targets_[number].holdings) return {0, 0};
        const Status& status = targets_[number].status;
        return {status.blocks[0], status.counters.removed};
    }

    // Free a part of the blocks that were cleared or dropped.
    void sweep() {
        const std::lock_guard turn(shared_.lock);
        shared_.sweep(kSweepBlocks);
    }

    std::size_t runs() {
        const std::lock_guard turn(shared_.lock);
        return shared_.tree.size();
    }

    bool is_sound() {
        const std::lock_guard turn(shared_.lock);
        return shared_.tree.is_sound();
    }

   private:
    struct Target {
        std::shared_ptr<Holdings> holdings;
        Status status;
    };

    static constexpr std::size_t kSweepBlocks = 2048;

    static u64 random_seed() {
        std::random_device random;
        return static_cast<u64>(random()) << 32 | random();
    }

    // Borrow the thread's own batch, whose memory is reused for the next one.
    static std::unique_ptr<Batch, void (*)(Batch*)> borrow() {
        thread_local Batch batch;
        return {&batch, [](Batch* used) { used->clear(); }};
    }

    Applied apply(
        const std::shared_ptr<Holdings>& target, std::string_view payload,
        const std::vector<std::pair<u32, std::string>>* known, bool trusted) {
        Applied applied;
        const auto batch = borrow();
        Decoder decoder(*batch, shared_.seed, trusted);
        applied.is_batch = decoder.decode_batch(payload);
        if (!applied.is_batch) return applied;
        const u32 count = static_cast<u32>(batch->events.size());
        if (known == nullptr) {
            for (u32 index = 0; index < count; ++index)
                if (batch->events[index].kind == EventKind::kForeign)
                    applied.foreign.emplace_back(index, batch->events[index].raw);
            if (!applied.foreign.empty()) return applied;
        } else {
            Decoder reader(*batch, shared_.seed, true);
            for (const auto& [index, bytes] : *known) {
                Reader in(bytes);
                if (index >= count || !reader.decode_event(in)) continue;
                batch->events[index] = batch->events.back();
                batch->events.pop_back();
            }
        }
        change(target, [&](Holdings& holdings) {
            const std::size_t sizes = holdings.block_sizes().size();
            apply_events(holdings, *batch, applied);
            applied.new_block_size = holdings.block_sizes().size() != sizes;
        });
        return applied;
    }

    // Call `call` with a registered target while no other thread can change it, then publish the target's new status.
    template <typename Call>
    void change(const std::shared_ptr<Holdings>& holdings, Call call) {
        if (!holdings) return;
        const std::lock_guard owner(holdings->changing);
        if (!holdings->alive) return;
        call(*holdings);
        Status status = holdings->status();
        const std::lock_guard guard(targets_lock_);
        Target& target = targets_[holdings->number];
        if (target.holdings == holdings) target.status = std::move(status);
    }

    void apply_events(Holdings& holdings, const Batch& batch, Applied& applied) {
        const u32 count = static_cast<u32>(batch.events.size());
        for (u32 first = 0, last; first < count; first = last) {
            // Tables grow here, before the lock is taken, so that no other thread waits meanwhile.
            std::size_t names = 0;
            for (last = first; last < count && names < kNamesAtOnce; ++last) {
                holdings.reserve(batch.events[last]);
                names += batch.events[last].names.count + 1;
            }
            Turns turns(shared_.lock);
            for (u32 index = first; index < last; ++index) {
                const Event& event = batch.events[index];
                if (event.kind == EventKind::kForeign) continue;
                applied.cleared |= event.kind == EventKind::kCleared && event.medium.data() == nullptr;
                try {
                    holdings.apply(event, batch, turns);
                } catch (const UnusableEvent& error) {
                    applied.rejected.push_back({index, error.reason});
                }
            }
        }
        holdings.shrink();
        Turns turns(shared_.lock);
        holdings.keep_within_capacity(turns);
        shared_.sweep(kSweepBlocks);
    }

    static constexpr std::size_t kNamesAtOnce = 256;

    Shared shared_;
    Matcher matcher_;  // guarded by `shared_.lock`
    std::mutex targets_lock_;
    std::vector<Target> targets_;
};

}  // namespace kvrouter
