// The blocks of a shared pool (indexer/pools/blocks.py is the specification).
#pragma once

#include <array>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "events.hpp"
#include "tree.hpp"

namespace kvrouter {

// A hash table of at most `limit` values by number, in which new keys replace about the oldest ones. No key is 0.
template <typename Value>
class RecentTable {
   public:
    RecentTable(u32 limit, u64 seed)
        : limit_(std::max(limit, 1u)), mask_(std::bit_ceil(limit_ + limit_ / 3 + 1) - 1), seed_(seed),
          slots_(static_cast<u32*>(std::calloc(mask_ + std::size_t{1}, sizeof(u32)))) {
        if (slots_ == nullptr) throw std::bad_alloc();
    }
    RecentTable(const RecentTable&) = delete;
    RecentTable& operator=(const RecentTable&) = delete;
    ~RecentTable() { std::free(slots_); }

    u32 size() const { return size_; }

    Value* find(u64 key) {
        if (key == 0) return nullptr;
        const u32 number = slots_[slot_of(key)];
        return number == 0 ? nullptr : &entry(number - 1).value;
    }

    // Load what `find` reads of a key, without waiting: first the slot, then the entry that the slot names.
    void prefetch_slot(u64 key) const { __builtin_prefetch(slots_ + (mixed(key ^ seed_) & mask_)); }
    void prefetch_entry(u64 key) {
        const u32 number = slots_[mixed(key ^ seed_) & mask_];
        if (number != 0) __builtin_prefetch(&entry(number - 1));
    }

    // Return the value of a key, or a new one. Adds the number of replaced keys to `replaced`.
    Value& find_or_add(u64 key, u64& replaced) {
        if (Value* known = find(key)) return *known;
        u32 number;
        if (!free_.empty()) {
            number = free_.back();
            free_.pop_back();
        } else if (used_ < limit_) {
            if (used_ % kPage == 0) pages_.push_back(std::make_unique<Entry[]>(kPage));
            number = used_++;
        } else {
            number = oldest_;
            oldest_ = oldest_ + 1 == limit_ ? 0 : oldest_ + 1;
            vacate(slot_of(entry(number).key));
            --size_;
            ++replaced;
        }
        slots_[slot_of(key)] = number + 1;
        ++size_;
        entry(number) = {key, {}};
        return entry(number).value;
    }

    void remove(u64 key) {
        const u32 slot = slot_of(key), number = slots_[slot];
        if (number == 0) return;
        vacate(slot);
        entry(number - 1) = {};
        free_.push_back(number - 1);
        --size_;
    }

    void clear() {
        std::free(slots_);
        slots_ = static_cast<u32*>(std::calloc(mask_ + std::size_t{1}, sizeof(u32)));
        if (slots_ == nullptr) throw std::bad_alloc();
        pages_.clear();
        free_.clear();
        used_ = oldest_ = size_ = 0;
    }

    u64 bytes() const {
        return (mask_ + u64{1}) * sizeof(u32) + pages_.size() * kPage * sizeof(Entry) + free_.capacity() * sizeof(u32);
    }

   private:
    struct Entry {
        u64 key = 0;
        Value value{};
    };
    static constexpr u32 kPage = 4096;

    Entry& entry(u32 number) { return pages_[number / kPage][number % kPage]; }

    // Return the slot of a key, or the empty slot where it belongs.
    u32 slot_of(u64 key) {
        u32 slot = static_cast<u32>(mixed(key ^ seed_)) & mask_;
        while (slots_[slot] != 0 && entry(slots_[slot] - 1).key != key) slot = (slot + 1) & mask_;
        return slot;
    }

    // Empty a slot, and move later keys of its cluster to where they are found without it.
    void vacate(u32 slot) {
        for (u32 next = (slot + 1) & mask_; slots_[next] != 0; next = (next + 1) & mask_) {
            const u32 home = static_cast<u32>(mixed(entry(slots_[next] - 1).key ^ seed_)) & mask_;
            if (((next - home) & mask_) < ((next - slot) & mask_)) continue;
            slots_[slot] = slots_[next];
            slot = next;
        }
        slots_[slot] = 0;
    }

    const u32 limit_, mask_;
    const u64 seed_;
    u32* slots_;  // an entry's number + 1; 0 is empty
    std::vector<std::unique_ptr<Entry[]>> pages_;
    std::vector<u32> free_;
    u32 used_ = 0, oldest_ = 0, size_ = 0;
};

class PoolBlocks {
   public:
    // The bytes of an engine's hash without its name.
    using Rest = std::array<char, 24>;
    // A change of one object, in the packed form of `apply`.
    struct Change {
        u64 name;
        Rest rest;
        u8 part, on_disk, stored, unused[5];
    };

    PoolBlocks(u32 limit, const std::vector<std::string>& media, u64 seed)
        : media_(media.begin(), media.end()), chain_(limit, seed), objects_(limit, seed) {}

    bool hears(std::string_view medium) const { return !media_.empty() && media_.contains(medium); }

    // Return an engine's name as a number of 64 bits: its last bytes, if it is bytes.
    static u64 number_of(const Name& name) {
        if (name.kind != Name::kBytes) return name.key;
        u64 number = 0;
        for (const char byte : name.bytes.substr(name.bytes.size() - std::min<std::size_t>(name.bytes.size(), 8)))
            number = number << 8 | static_cast<u8>(byte);
        return number;
    }

    void learn(std::span<const u64> hashes, std::span<const Name> names) {
        const std::lock_guard guard(lock_);
        for (std::size_t block = 0; block < hashes.size(); ++block)
            if (hashes[block] != 0) chain_.find_or_add(hashes[block], replaced_) = number_of(names[block]);
    }

    void hint(const Event& event, const Batch& batch) {
        const std::lock_guard guard(lock_);
        if (event.kind == EventKind::kCleared) objects_.clear();
        for (u32 index = 0; index < event.names.count; ++index)
            change({number_of(batch.names[event.names.first + index]), {}, 0, 0, event.kind == EventKind::kStored, {}});
    }

    void apply(std::string_view changes) {
        const std::lock_guard guard(lock_);
        for (; changes.size() >= sizeof(Change); changes.remove_prefix(sizeof(Change))) {
            Change each;
            std::memcpy(&each, changes.data(), sizeof(Change));
            change(each);
        }
    }

    void clear() {
        const std::lock_guard guard(lock_);
        objects_.clear();
    }

    // Append the ranges of blocks that the pool holds, up to the first missing block from `reach` on.
    void match(std::span<const u64> hashes, u64 reach, u64& needed, u64 allowed, std::vector<u32>& ranges) {
        const std::lock_guard guard(lock_);
        parts_.clear();
        for (bool missing = false; !missing && parts_.size() < hashes.size();) {
            std::array<u64, kTogether> names{};
            const auto group = hashes.subspan(parts_.size(), std::min(kTogether, hashes.size() - parts_.size()));
            for (const u64 hash : group) chain_.prefetch_slot(hash);
            for (const u64 hash : group) chain_.prefetch_entry(hash);
            for (std::size_t place = 0; place < group.size(); ++place) {
                const u64* name = chain_.find(group[place]);
                names[place] = name == nullptr ? 0 : *name;
                objects_.prefetch_slot(names[place]);
            }
            for (const u64 name : names) objects_.prefetch_entry(name);
            for (std::size_t place = 0; place < group.size(); ++place) {
                const Object* object = objects_.find(names[place]);
                const u64 parts =
                    object == nullptr || object->ambiguous ? 0 : (object->memory | object->disk) & allowed;
                missing = parts == 0 && parts_.size() >= reach;
                if (missing) break;
                needed |= parts;
                parts_.push_back(parts);
            }
        }
        bool before = false;
        for (u32 block = 0; block < parts_.size(); ++block) {
            const bool whole = parts_[block] != 0 && parts_[block] == needed;
            if (whole != before) ranges.push_back(block);
            if (!whole && block >= reach) return;
            before = whole;
        }
        if (before) ranges.push_back(static_cast<u32>(parts_.size()));
    }

    // What the pool has of a block: parts is 0 if nothing is known of it, or if two blocks have its name.
    struct Stored {
        u64 name = 0;
        Rest rest{};
        u64 parts = 0;
    };
    std::vector<Stored> stored(std::span<const u64> hashes) {
        const std::lock_guard guard(lock_);
        std::vector<Stored> found;
        for (const u64 hash : hashes) {
            const u64* name = chain_.find(hash);
            const Object* object = name == nullptr ? nullptr : objects_.find(*name);
            if (object == nullptr || object->ambiguous) found.push_back({});
            else found.push_back({*name, object->rest, object->memory | object->disk});
        }
        return found;
    }

    struct Sizes {
        u64 chain, objects, bytes, replaced;
    };
    Sizes sizes() {
        const std::lock_guard guard(lock_);
        return {chain_.size(), objects_.size(), chain_.bytes() + objects_.bytes(), replaced_};
    }

   private:
    struct Object {
        u64 memory = 0, disk = 0;  // parts of the block, one bit each
        Rest rest{};
        bool ambiguous = false;  // two blocks have this name
    };
    static constexpr std::size_t kTogether = 16;  // blocks whose memory is loaded at once

    void change(const Change& change) {
        if (change.name == 0) return;
        const u64 bit = u64{1} << (change.part & 63);
        if (change.stored) {
            Object& object = objects_.find_or_add(change.name, replaced_);
            if ((object.memory | object.disk) == 0) object.rest = change.rest;
            object.ambiguous |= object.rest != change.rest;
            (change.on_disk ? object.disk : object.memory) |= bit;
        } else if (Object* object = objects_.find(change.name)) {
            (change.on_disk ? object->disk : object->memory) &= ~bit;
            if ((object->memory | object->disk) == 0) objects_.remove(change.name);
        }
    }

    const std::set<std::string, std::less<>> media_;
    std::mutex lock_;  // guards all fields below; never held while another lock is taken
    RecentTable<u64> chain_;  // engines' names by prefix hash
    RecentTable<Object> objects_;  // by engines' name
    u64 replaced_ = 0;
    std::vector<u64> parts_;  // kept between matches, to save allocations
};

}  // namespace kvrouter
