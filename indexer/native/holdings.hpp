// Holdings of one target: the positions of its blocks in the prefix tree, by cache group and medium. The reasons are in
// indexer/reference/holdings.py, the specification of this code.
#pragma once

#include <map>

#include "identity.hpp"
#include "name_table.hpp"
#include "orphans.hpp"
#include "pool.hpp"
#include "turns.hpp"

namespace kvrouter {

// indexer/reference/holdings.py has the same limits.
inline constexpr std::size_t kMostHolders = 64, kMostBlockSizes = 8, kMostAdaptersInKeys = 1024;

class Holdings;

// The blocks that a target holds in one medium for one cache group.
struct Holder {
    Holder(u32 number, Holdings* owner, Integer group, std::string_view medium, u64 seed)
        : number(number), owner(owner), group(group), medium(medium), tier(tier_of(medium)), names(seed) {}

    u32 number;
    Holdings* owner;
    bool windowed = false;  // needs only the last `window` blocks of a prefix
    Integer group;
    std::string medium;
    Tier tier;
    u64 window = 0;
    u64 reach = 0;  // tokens before the last one that a hit needs, from which `window` is computed; 0 if it is not
    u64 stored_events = 0;  // number of stored events
    bool evicts = false;  // a block was removed from it
    NameTable names;
    std::unordered_map<u64, u32> namesakes;  // engine names beyond the first of equal blocks, by place
    u32 swept = 0;                           // number of freed entries of a dropped holder
};

// The part of a holder that matches need.
struct Standing {
    u32 target = 0;
    Tier tier = kUnknownTier;
    bool alive = false;
    bool hybrid = false;  // its target has several groups, or one that keeps only the last blocks
};

struct Counters {
    u64 stored = 0, removed = 0, cleared = 0, unknown_removed = 0, orphans_dropped = 0, over_capacity = 0, ignored = 0;

    bool operator==(const Counters&) const = default;
};

// State of a target for other threads.
struct Status {
    u64 blocks[kTiers] = {};
    u64 orphans = 0;
    Counters counters;
    std::vector<u64> block_sizes;
    std::optional<u64> window;  // the smallest window of the groups that keep only the last blocks

    bool operator==(const Status&) const = default;
};

// State that all targets share.
struct Shared {
    Shared(std::string secret, u64 seed, std::size_t orphan_blocks, u64 most_blocks)
        : secret(std::move(secret)), seed(seed), orphan_blocks(orphan_blocks), most_blocks(most_blocks), tree(seed) {}

    Holder* make(Holdings* owner, u32 target, Integer group, std::string_view medium) {
        u32 number = static_cast<u32>(holders.size());
        if (free_numbers.empty()) {
            holders.emplace_back();
            standings.emplace_back();
        } else {
            number = free_numbers.back();
            free_numbers.pop_back();
        }
        holders[number] = std::make_unique<Holder>(number, owner, group, medium, seed);
        standings[number] = {target, holders[number]->tier, true};
        return holders[number].get();
    }

    // Drop a holder: it stops matching at once, and its memory is freed in steps.
    void retire(Holder* holder) {
        standings[holder->number].alive = false;
        holder->names.forget_names();
        given_up.push_back(holder);
    }

    // Free up to `blocks` blocks of dropped holders.
    void sweep(std::size_t blocks) {
        while (!given_up.empty()) {
            Holder& holder = *given_up.front();
            for (; holder.swept < holder.names.end(); ++holder.swept) {
                if (blocks-- == 0) return;
                const NameTable::Entry& entry = holder.names.entry(holder.swept);
                if (!NameTable::is_gap(entry)) tree.vacate_all(entry.run, holder.number);
                if (holder.names.ends_page(holder.swept)) holder.names.forget_page(holder.swept);
            }
            free_numbers.push_back(holder.number);
            given_up.pop_front();
            holders[free_numbers.back()].reset();
        }
    }

    const std::string secret;
    const u64 seed;
    const std::size_t orphan_blocks;
    const u64 most_blocks;
    TurnLock lock;  // guards all fields below
    PrefixTree tree;
    std::vector<std::unique_ptr<Holder>> holders;  // by number
    std::vector<Standing> standings;  // by number; contiguous, because a match may read thousands
    std::vector<u32> free_numbers;
    std::list<Holder*> given_up;
};

// Callers of functions that change something own the target and have the turn.
class Holdings {
   public:
    Holdings(Shared& shared, std::string model, std::string tenant, std::optional<std::string> adapter,
             std::optional<u64> capacity)
        : shared_(shared), tree_(shared.tree), model_(std::move(model)), tenant_(std::move(tenant)),
          adapter_(std::move(adapter)), capacity_(capacity), orphans_(shared.orphan_blocks, shared.seed),
          early_(8, NameHash{shared.seed}) {}

    bool alive = true;
    u32 number = 0;
    std::mutex changing;  // held by the thread that changes these holdings
    std::shared_ptr<PoolBlocks> pool;  // the pool that the target can load from

    const std::vector<Holder*>& holders() const { return holders_; }
    const std::vector<u64>& block_sizes() const { return block_sizes_; }

    // Return whether a cache group belongs to the model: it has about as many stored events as the others. `seen`: it
    // holds a part of the prompt in question. One stored event is enough for a group that blocks were removed from.
    bool counts(const Integer& group, bool seen) const {
        u64 of_group = 0, most = 0;
        std::map<std::pair<bool, u64>, u64> by_group;
        for (const Holder* holder : holders_) {
            u64& sum = by_group[{holder->group.negative, holder->group.bits}];
            sum += holder->stored_events;
            most = std::max(most, sum);
            if (holder->group == group) of_group = sum, seen = seen || holder->evicts;
        }
        return of_group * 8 >= most && (of_group > 1 || seen);
    }

    // Reserve memory for the names of an event. Takes time in proportion to the number of names, and needs no turn.
    void reserve(const Event& event) {
        if (event.kind != EventKind::kStored) return;
        if (Holder* holder = find_holder(event)) holder->names.reserve(event.names.count);
    }

    // Throws UnusableEvent for an invalid event, which changes nothing.
    void apply(const Event& event, const Batch& batch, Turns& turns) {
        if (pool != nullptr && pool->hears(medium_of(event))) {
            pool->hint(event, batch);
        } else if (event.is_pooled()) {
            ++counters_.ignored;
        } else if (event.kind == EventKind::kStored) {
            store(event, batch, turns);
        } else if (event.kind == EventKind::kRemoved) {
            Holder* holder = find_holder(event);
            const Name* names = batch.names.data() + event.names.first;
            if (holder != nullptr) fetch_first(*holder, names, event.names.count);
            for (u32 index = 0; index < event.names.count; ++index) {
                if (holder != nullptr && index + kAhead < event.names.count) holder->names.prefetch(names[index + kAhead]);
                if (!remove_held(names[index], holder)) remove_waiting(names[index], event.group, medium_of(event), 1);
                turns.did(1);
            }
        } else if (event.medium.data() == nullptr) {
            clear();
        } else {
            clear_medium(event.medium);
        }
    }

    void clear() {
        for (Holder* holder : holders_) shared_.retire(holder);
        holders_.clear();
        orphans_.clear();
        early_.clear();
        early_size_ = 0;
        adapters_in_keys_.clear();
        hybrid_ = false;
        ++counters_.cleared;
    }

    // Remove all blocks and the target itself.
    void drop() {
        clear();
        alive = false;
    }

    // Free unused memory. Takes time in proportion to the number of names, and needs no turn.
    void shrink() {
        for (Holder* holder : holders_) holder->names.shrink();
    }

    // Drop the oldest blocks beyond the capacity of the engine, or of any engine: their removal was lost.
    void keep_within_capacity(Turns& turns) {
        if (capacity_ && !hybrid_)
            for (Holder* holder : holders_)
                while (holder->tier == kGpu && holder->names.size() > *capacity_)
                    drop_oldest(*holder, holder->names.size() - *capacity_, turns);
        u64 blocks = 0;
        for (const Holder* holder : holders_) blocks += holder->names.size();
        if (blocks <= shared_.most_blocks) return;
        const u64 kept = shared_.most_blocks - shared_.most_blocks / 16;  // a margin, so that this is rare
        while (blocks > kept) {
            Holder* largest = holders_.front();
            for (Holder* holder : holders_)
                if (holder->names.size() > largest->names.size()) largest = holder;
            const u64 before = largest->names.size();
            drop_oldest(*largest, std::min(blocks - kept, before), turns);
            blocks -= before - largest->names.size();
        }
    }

    Status status() const {
        Status status;
        for (int tier = 0; tier < kTiers; ++tier) {
            for (const Holder* holder : holders_) {
                u64 in_group = 0;
                for (const Holder* other : holders_)
                    if (other->tier == tier && other->group == holder->group) in_group += other->names.size();
                status.blocks[tier] = std::max(status.blocks[tier], in_group);
            }
        }
        status.orphans = orphans_.size();
        status.counters = counters_;
        status.block_sizes = block_sizes_;
        for (const Holder* holder : holders_)
            if (holder->windowed) status.window = std::min(status.window.value_or(holder->window), holder->window);
        return status;
    }

    // For restoring a dump: these holdings must be empty.
    void know_block_size(u64 size) {
        if (std::find(block_sizes_.begin(), block_sizes_.end(), size) == block_sizes_.end() &&
            block_sizes_.size() < kMostBlockSizes)
            block_sizes_.push_back(size);
    }
    Holder& restored_holder(Integer group, std::string_view medium, std::optional<u64> window, u64 blocks) {
        Holder& holder = holder_of(group, medium);
        holder.windowed = window.has_value();
        holder.window = window.value_or(0);
        holder.stored_events = std::min<u64>(blocks, 32);
        if (holder.windowed) become_hybrid();
        holder.names.reserve(blocks);
        return holder;
    }
    void restore_block(Holder& holder, const Name& name, Place place) { hold_at(holder, name, place); }

   private:
    static std::string_view medium_of(const Event& event) { return event.medium.empty() ? "GPU" : event.medium; }

    static u64 key_of(Place place) { return static_cast<u64>(place.run) << 32 | place.offset; }

    Holder* find_holder(const Integer& group, std::string_view medium) {
        for (Holder* holder : holders_)
            if (holder->group == group && holder->medium == medium) return holder;
        return nullptr;
    }
    Holder* find_holder(const Event& event) { return find_holder(event.group, medium_of(event)); }

    Holder& holder_of(const Integer& group, std::string_view medium) {
        if (Holder* known = find_holder(group, medium)) return *known;
        if (holders_.size() >= kMostHolders)
            throw UnusableEvent{"more than " + std::to_string(kMostHolders) + " combinations of cache group and medium"};
        const bool alike = std::ranges::all_of(holders_, [&](const Holder* other) { return other->group == group; });
        holders_.push_back(shared_.make(this, number, group, medium));
        if (hybrid_ || !alike) become_hybrid();
        return *holders_.back();
    }

    void become_hybrid() {
        hybrid_ = true;
        for (const Holder* holder : holders_) shared_.standings[holder->number].hybrid = true;
    }

    std::optional<Place> find(const Name& name, Holder* first = nullptr) {
        if (first != nullptr)
            if (const auto* entry = first->names.find(name)) return Place{entry->run, entry->offset};
        for (Holder* holder : holders_)
            if (const auto* entry = holder->names.find(name)) return Place{entry->run, entry->offset};
        return std::nullopt;
    }

    void store(const Event& event, const Batch& batch, Turns& turns) {
        if (event.group_kind != GroupKind::kWhole) {
            store_window(event, batch, turns);
        } else if (event.names.count == 0) {
            ++counters_.ignored;
        } else if (event.tokens.count == 0 || !event.is_identified()) {
            store_known(event, batch, turns);
        } else if (!place(event, batch, turns)) {
            auto orphan = std::make_unique<Orphan>();
            orphan->event = event.raw;
            orphan->trusted = event.trusted;
            orphan->parent = {event.parent.key, {}, event.parent.kind};
            for (u32 index = 0; index < event.names.count; ++index) {
                const Name& name = batch.names[event.names.first + index];
                orphan->names.push_back({name.key, {}, name.kind});
            }
            orphan->medium = medium_of(event);
            counters_.orphans_dropped += orphans_.park(std::move(orphan));
            turns.did(event.names.count);
        } else if (orphans_.size() > 0) {
            adopt(event, batch, turns);
        }
    }

    // Add an event's blocks to the tree. Returns false if its parent is unknown.
    bool place(const Event& event, const Batch& batch, Turns& turns) {
        const u32 count = event.names.count;
        const Name* names = batch.names.data() + event.names.first;
        check_names(names, count);
        const u64 block_size = block_size_of(event);
        Place at{kRoot, 0};
        std::int64_t offset = -1;
        u64 hash;
        std::vector<std::optional<std::string>> keys;
        Holder* known = find_holder(event);
        if (event.has_parent) {
            const auto parent = find(event.parent, known);
            if (!parent) {
                if (event.parent.kind != Name::kNumber || event.parent.key != 0) return false;
                Event first = event;
                first.has_parent = false;
                return place(first, batch, turns);
            }
            at = *parent;
            offset = at.offset;
            hash = tree_.run(at.run).hashes[at.offset];
            if (event.keys.count > 0) keys = identity_of(event, batch, adapters_in_keys_).keys;
        } else {
            hash = start(event, batch, block_size, keys);
        }
        Holder& holder = known != nullptr ? *known : holder_of(event.group, medium_of(event));
        holder.names.reserve(count);
        ++holder.stored_events;
        fetch_first(holder, names, count);  // while these are hashed
        hashes_.resize(count);
        const u32* tokens = batch.tokens.data() + event.tokens.first;
        for (u32 block = 0; block < count; ++block, tokens += block_size) {
            if (keys.empty() || !keys[block]) {
                hash = xxh3::hash(tokens, block_size * sizeof(u32), hash);
            } else {
                std::string bytes(reinterpret_cast<const char*>(tokens), block_size * sizeof(u32));
                bytes += *keys[block];
                hash = xxh3::hash(bytes.data(), bytes.size(), hash);
            }
            hashes_[block] = hash;
        }
        if (pool != nullptr) pool->learn(hashes_, {names, count});
        const bool recounts = hybrid_ || event.has_parent || !all_in(names, count, holder);
        left_.clear();
        for (u32 done = 0; done < count;) {
            const Span span = tree_.insert(at.run, offset, hashes_.data() + done, count - done);
            hold(holder, span, names + done, recounts);
            at.run = span.run;
            offset = span.start + span.count - 1;
            done += span.count;
            turns.did(span.count);
        }
        for (const Place place : left_) vacate(holder, place);
        if (early_size_ > 0) hold_early(names, count);
        if (hashes_.capacity() > kKeptHashes) hashes_ = {};
        return true;
    }

    // Return the seed and the extra keys of blocks that start a prompt.
    u64 start(const Event& event, const Batch& batch, u64 block_size, std::vector<std::optional<std::string>>& keys) {
        Identity identity = identity_of(event, batch, adapters_in_keys_);
        if (std::find(block_sizes_.begin(), block_sizes_.end(), block_size) == block_sizes_.end()) {
            if (block_sizes_.size() >= kMostBlockSizes)
                throw UnusableEvent{"block_size " + std::to_string(block_size) + " is new, and the target has " +
                                    std::to_string(kMostBlockSizes) + " already"};
            block_sizes_.push_back(block_size);
            for (Holder* holder : holders_)
                if (holder->windowed && holder->reach > 0)
                    holder->window = std::min(holder->window, blocks_in(holder->reach, block_size));
        }
        if (identity.adapter && event.lora_name.data() == nullptr && !event.has_lora_id &&
            adapters_in_keys_.size() < kMostAdaptersInKeys)
            adapters_in_keys_.insert(*identity.adapter);
        keys = std::move(identity.keys);
        const auto& adapter = identity.adapter.value_or("").empty() ? adapter_ : identity.adapter;
        return namespace_hash(shared_.secret, model_, tenant_, adapter, identity.salt, block_size);
    }

    void check_names(const Name* names, u32 count) {
        if (count < 2) return;
        const u32 mask = std::bit_ceil(count * 2) - 1;
        seen_.assign(mask + 1, 0);
        for (u32 index = 0; index < count; ++index) {
            u32 slot = static_cast<u32>(mixed(names[index].key ^ shared_.seed)) & mask;
            for (; seen_[slot] != 0; slot = (slot + 1) & mask)
                if (names[seen_[slot] - 1] == names[index]) throw UnusableEvent{"block_hashes has a duplicate"};
            seen_[slot] = index + 1;
        }
        if (seen_.capacity() > 2 * kKeptHashes) seen_ = {};
    }

    static u64 block_size_of(const Event& event) {
        const u64 count = event.names.count, tokens = event.tokens.count;
        const Integer& said = event.block_size;
        const u64 block_size = said.bits != 0 ? said.bits : tokens / count;
        if (said.negative || block_size == 0 || block_size > tokens || tokens != count * block_size)
            throw UnusableEvent{"token_ids has " + std::to_string(tokens) + " ids for " + std::to_string(count) +
                                " blocks of block_size " + said.text()};
        if (!event.tokens_fit) throw UnusableEvent{"token_ids has an id that is not an unsigned 32-bit integer"};
        return block_size;
    }

    static bool all_in(const Name* names, u32 count, Holder& holder) {
        for (u32 index = 0; index < count; ++index)
            if (holder.names.find(names[index]) == nullptr) return false;
        return true;
    }

    // Add the orphans whose parents are these blocks, and the orphans whose parents are those.
    void adopt(const Event& event, const Batch& batch, Turns& turns) {
        Orphans::List pending;
        std::vector<Removal> removals;  // applied last, so that children of a removed block find their parent
        for (u32 index = 0; index < event.names.count; ++index)
            orphans_.adopt(batch.names[event.names.first + index], pending);
        Batch own;
        while (!pending.empty()) {
            const std::unique_ptr<Orphan> orphan = std::move(pending.back());
            pending.pop_back();
            own.clear();
            Reader in(orphan->event);
            Decoder(own, shared_.seed, orphan->trusted).decode_event(in);
            const Event& waited = own.events.front();
            try {
                if (!place(waited, own, turns)) continue;
            } catch (const UnusableEvent&) {
                counters_.orphans_dropped += orphan->names.size();
                continue;
            }
            std::move(orphan->removals.begin(), orphan->removals.end(), std::back_inserter(removals));
            for (u32 index = 0; index < waited.names.count; ++index)
                orphans_.adopt(own.names[waited.names.first + index], pending);
        }
        for (const Removal& removal : removals) {
            Holder* holder = find_holder(removal.group, removal.medium);
            u64 left = removal.times;
            for (; left > 0 && remove_held(removal.name, holder); --left) turns.did(1);
            if (left > 0) remove_waiting(removal.name, removal.group, removal.medium, left);
            turns.did(1);
        }
    }

    // Remove one copy of a block that is held, or that waits for its prefix.
    bool remove_held(const Name& name, Holder* holder) {
        if (auto* entry = holder == nullptr ? nullptr : holder->names.find(name)) {
            if (entry->copies > 0) {
                --entry->copies;
            } else {
                ++counters_.removed;
                holder->evicts = true;
                vacate(*holder, {entry->run, entry->offset});
                holder->names.remove(*entry);
            }
            return true;
        }
        return holder != nullptr && forget_early(*holder, name);
    }

    // Remove copies of a block that is not held. It costs the same for any number of `times`.
    void remove_waiting(const Name& name, const Integer& group, std::string_view medium, u64 times) {
        if (!orphans_.remove(name, group, medium, times, counters_.orphans_dropped)) counters_.unknown_removed += times;
    }

    // Add copies of known blocks in another medium, by their names: an event without tokens or without identity.
    void store_known(const Event& event, const Batch& batch, Turns& turns) {
        Holder& holder = holder_of(event.group, medium_of(event));
        holder.names.reserve(event.names.count);
        ++holder.stored_events;
        for (u32 index = 0; index < event.names.count; ++index) {
            const Name& name = batch.names[event.names.first + index];
            if (const auto place = find(name)) {
                hold_at(holder, name, *place);
            } else {
                ++counters_.orphans_dropped;
            }
            turns.did(1);
        }
    }

    // Add blocks of a sliding-window group. Their positions come from the full-attention group.
    void store_window(const Event& event, const Batch& batch, Turns& turns) {
        const auto window = window_of(event, block_sizes_.empty() ? 0 : std::ranges::max(block_sizes_));
        const Holder* known = find_holder(event);
        if (!window || (known != nullptr && !known->windowed && known->names.size() > 0)) {
            ++counters_.ignored;
            return;
        }
        Holder& holder = holder_of(event.group, medium_of(event));
        holder.names.reserve(event.names.count);
        ++holder.stored_events;
        become_hybrid();
        holder.windowed = true;
        holder.window = *window;
        holder.reach = event.group_kind == GroupKind::kSliding ? event.window.bits - 1 : 0;
        for (u32 index = 0; index < event.names.count; ++index) {
            const Name& name = batch.names[event.names.first + index];
            if (const auto place = find(name)) {
                hold_at(holder, name, *place);
            } else if (early_size_ < orphans_.limit()) {
                early_[{name.key, {}, name.kind}].push_back(&holder);
                ++early_size_;
            } else {
                ++counters_.orphans_dropped;
            }
            turns.did(1);
        }
    }

    // Maximum window. A longer one is equivalent to full attention, and does not fit into a dump.
    static constexpr u64 kMostWindow = u64{1} << 31;

    // Return the number of last blocks that a hit needs in an event's group; nullopt for an unknown kind of group.
    // `whole`: the block size of whole prefixes; 0 if it is not known yet.
    static std::optional<u64> window_of(const Event& event, u64 whole) {
        if (event.group_kind == GroupKind::kState) return 1;
        if (event.group_kind != GroupKind::kSliding || !event.has_window) return std::nullopt;
        if (!event.window.positive() || !event.block_size.positive()) return std::nullopt;
        return std::min(blocks_in(event.window.bits - 1, std::max(event.block_size.bits, whole)), kMostWindow);
    }

    static u64 blocks_in(u64 tokens, u64 block_size) { return tokens / block_size + (tokens % block_size != 0); }

    void hold_early(const Name* names, u32 count) {
        for (u32 index = 0; index < count && early_size_ > 0; ++index) {
            const auto found = early_.find(names[index]);
            if (found == early_.end()) continue;
            const auto holders = std::move(found->second);
            early_.erase(found);
            early_size_ -= holders.size();
            for (Holder* holder : holders) {
                holder->names.reserve(1);
                hold_at(*holder, names[index], *find(names[index]));
            }
        }
    }

    bool forget_early(const Holder& holder, const Name& name) {
        const auto found = early_.find(name);
        if (found == early_.end()) return false;
        auto& holders = found->second;
        const auto mine = std::find(holders.begin(), holders.end(), &holder);
        if (mine == holders.end()) return false;
        holders.erase(mine);
        --early_size_;
        if (holders.empty()) early_.erase(found);
        return true;
    }

    void clear_medium(std::string_view medium) {
        const auto is_gone = [this](const Holder* holder) { return !shared_.standings[holder->number].alive; };
        for (Holder* holder : holders_)
            if (holder->medium == medium) shared_.retire(holder);
        std::erase_if(holders_, is_gone);
        for (auto at = early_.begin(); at != early_.end();) {
            early_size_ -= std::erase_if(at->second, is_gone);
            at = at->second.empty() ? early_.erase(at) : std::next(at);
        }
        orphans_.clear_medium(medium);
    }

    void hold_at(Holder& holder, const Name& name, Place place) {
        left_.clear();
        hold(holder, {place.run, place.offset, 1}, &name, true);
        for (const Place left : left_) vacate(holder, left);
    }

    // Prefetch the first names, because the following lookups access memory at random.
    static void fetch_first(const Holder& holder, const Name* names, u32 count) {
        for (u32 index = 0; index < std::min(count, kAhead); ++index) holder.names.prefetch(names[index]);
    }

    // Mark blocks as held. If `recounts`, a block that is held already counts as another copy. `left_` gets the former
    // places of names that were elsewhere. The caller has reserved memory for the names.
    void hold(Holder& holder, Span span, const Name* names, bool recounts) {
        Held& mine = tree_.held_or_new(span.run, holder.number);
        const bool overlaps = mine.has_any(span.start, span.count);
        for (u32 index = 0; index < span.count; ++index) {
            if (index + kAhead < span.count) holder.names.prefetch(names[index + kAhead]);
            const Place place{span.run, span.start + index};
            auto* entry = holder.names.find(names[index]);
            if (entry == nullptr) {
                ++counters_.stored;
                holder.names.add(names[index], place);
            } else if (entry->run == place.run && entry->offset == place.offset) {
                if (recounts && entry->copies < NameTable::kMostCopies) ++entry->copies;
                continue;
            } else {
                left_.push_back({entry->run, entry->offset});
                entry->run = place.run;
                entry->offset = place.offset;
            }
            if (overlaps && mine.has(place.offset)) ++holder.namesakes[key_of(place)];
        }
        mine.add(span.start, span.count);
    }

    // Remove a name from a place. With its last name, the holder no longer holds the place.
    void vacate(Holder& holder, Place place) {
        if (!holder.namesakes.empty()) {
            if (const auto found = holder.namesakes.find(key_of(place)); found != holder.namesakes.end()) {
                if (--found->second == 0) holder.namesakes.erase(found);
                return;
            }
        }
        tree_.vacate(place.run, place.offset, holder.number);
    }

    // Drop at least one and at most `limit` blocks: the oldest first, but each block after its children.
    void drop_oldest(Holder& holder, u64 limit, Turns& turns) {
        u64 dropped = 0;
        std::vector<u32> passed;
        u32 oldest = kNobody;
        const auto drop = [&](u32 number) {
            NameTable::Entry& entry = holder.names.entry(number);
            vacate(holder, {entry.run, entry.offset});
            holder.names.remove(entry);
            ++dropped;
        };
        for (u32 number = 0; number < holder.names.end() && dropped < limit; ++number) {
            turns.did(1);
            if (NameTable::is_gap(holder.names.entry(number))) continue;
            if (oldest == kNobody) oldest = number;
            passed.push_back(number);
            while (!passed.empty() && dropped < limit) {
                const NameTable::Entry& last = holder.names.entry(passed.back());
                if (tree_.is_followed(last.run, last.offset, holder.number)) break;
                drop(passed.back());
                passed.pop_back();
            }
        }
        if (dropped == 0) drop(oldest);
        counters_.over_capacity += dropped;
    }

    static constexpr u32 kAhead = 16;  // number of prefetched names
    static constexpr std::size_t kKeptHashes = 1 << 16;

    Shared& shared_;
    PrefixTree& tree_;
    const std::string model_, tenant_;
    const std::optional<std::string> adapter_;
    const std::optional<u64> capacity_;
    std::vector<Holder*> holders_;
    bool hybrid_ = false;
    std::vector<u64> block_sizes_;
    Counters counters_;
    Adapters adapters_in_keys_;
    Orphans orphans_;
    std::unordered_map<Name, std::vector<Holder*>, NameHash> early_;  // window blocks that were stored before their prefix
    std::size_t early_size_ = 0;
    // Kept between events, to save allocations.
    std::vector<u64> hashes_;
    std::vector<Place> left_;
    std::vector<u32> seen_;
};

}  // namespace kvrouter
