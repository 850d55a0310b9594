// The engine's names of the blocks that a holder has, each with its block's place in the tree, in order of arrival.
//
// Entries are stored in pages. A hash table with open addressing finds an entry's number by its name; the unused bits
// of a slot hold a part of the name's hash. A removed entry leaves a gap until the table is rebuilt.
#pragma once

#include <vector>

#include "events.hpp"
#include "tree.hpp"

namespace kvrouter {

// The position of a block in the tree.
struct Place {
    u32 run = kRoot, offset = 0;

    bool operator==(const Place&) const = default;
};

class NameTable {
   public:
    struct Entry {
        u64 key;
        u32 run;
        u32 offset : 10;
        u32 kind : 2;    // a `Name::Kind`, or kGone for a gap
        u32 copies : 20;  // copies beyond the first, up to `kMostCopies`
    };
    static constexpr u32 kMostCopies = (1u << 20) - 1;

    explicit NameTable(u64 seed) : seed_(seed) {}
    NameTable(const NameTable&) = delete;
    NameTable& operator=(const NameTable&) = delete;
    ~NameTable() { std::free(slots_); }

    u32 size() const { return live_; }
    u32 end() const { return end_; }  // number of entries, gaps included

    Entry& entry(u32 number) { return pages_[number / kPage]->entries[number % kPage]; }
    const Entry& entry(u32 number) const { return pages_[number / kPage]->entries[number % kPage]; }
    static bool is_gap(const Entry& entry) { return entry.kind == kGone; }

    // Return the bytes of an entry's name that is no number.
    std::string_view bytes(u32 number) const { return pages_[number / kPage]->long_names[number % kPage]; }

    // Return the entry of a name, or null.
    Entry* find(const Name& name) {
        if (live_ == 0) return nullptr;
        const u64 hash = mixed(name.key ^ seed_);
        for (u32 slot = static_cast<u32>(hash) & mask(); slots_[slot] != 0; slot = (slot + 1) & mask()) {
            if (slots_[slot] >> log_ != tag(hash)) continue;
            Entry& found = entry((slots_[slot] & mask()) - 1);
            if (found.key == name.key && found.kind == name.kind) return &found;
        }
        return nullptr;
    }

    void prefetch(const Name& name) const {
        if (slots_ != nullptr) __builtin_prefetch(slots_ + (mixed(name.key ^ seed_) & mask()));
        asm volatile("");  // keeps GCC from removing calls of this function
    }

    // Reserve room for `more` names. Takes time in proportion to the number of names.
    void reserve(std::size_t more) {
        if (end_ + more > limit()) rebuild(live_ + more);
    }

    // Add a new name. The caller has reserved room for it.
    void add(const Name& name, Place place) {
        if (end_ == pages_.size() * kPage) pages_.push_back(std::make_unique<Page>());
        Page& page = *pages_[end_ / kPage];
        page.entries[end_ % kPage] = {name.key, place.run, place.offset, name.kind, 0};
        if (name.kind == Name::kBytes) {
            if (page.long_names == nullptr) page.long_names = std::make_unique<std::string[]>(kPage);
            page.long_names[end_ % kPage] = name.bytes;
        }
        index(end_++);
        ++live_;
    }

    void remove(Entry& entry) {
        entry.kind = kGone;
        --live_;
    }

    // Free memory if most entries are gaps.
    void shrink() {
        if (end_ > kPage && live_ < end_ / 4) rebuild(live_);
    }

    // Free the hash table of names. Only entries can be read afterwards, page by page.
    void forget_names() {
        std::free(slots_);
        slots_ = nullptr;
        log_ = 0;
    }
    void forget_page(u32 number) { pages_[number / kPage].reset(); }
    bool ends_page(u32 number) const { return number % kPage == kPage - 1; }

   private:
    static constexpr u32 kPage = 256;
    static constexpr u32 kGone = 3;

    struct Page {
        Entry entries[kPage];
        std::unique_ptr<std::string[]> long_names;
    };

    u32 mask() const { return (1u << log_) - 1; }
    u32 tag(u64 hash) const { return static_cast<u32>(hash >> 32 >> log_); }
    std::size_t limit() const { return slots_ == nullptr ? 0 : (std::size_t{3} << log_) / 4; }

    void index(u32 number) {
        const u64 hash = mixed(entry(number).key ^ seed_);
        u32 slot = static_cast<u32>(hash) & mask();
        while (slots_[slot] != 0) slot = (slot + 1) & mask();
        slots_[slot] = tag(hash) << log_ | (number + 1);
    }

    // Close the gaps, and make the hash table large enough for `names` names and a margin.
    void rebuild(std::size_t names) {
        u32 kept = 0;
        for (u32 number = 0; number < end_; ++number) {
            if (is_gap(entry(number))) continue;
            if (number != kept) {
                entry(kept) = entry(number);
                if (entry(kept).kind == Name::kBytes) {
                    Page& page = *pages_[kept / kPage];
                    if (page.long_names == nullptr) page.long_names = std::make_unique<std::string[]>(kPage);
                    page.long_names[kept % kPage] = std::move(pages_[number / kPage]->long_names[number % kPage]);
                }
            }
            ++kept;
        }
        end_ = kept;
        pages_.resize((end_ + kPage - 1) / kPage);
        pages_.shrink_to_fit();
        std::free(slots_);
        slots_ = nullptr;
        log_ = kSmallest;
        while ((std::size_t{3} << log_) / 4 < names + names / 8) ++log_;
        slots_ = static_cast<u32*>(std::calloc(std::size_t{1} << log_, sizeof(u32)));
        if (slots_ == nullptr) throw std::bad_alloc();
        for (u32 number = 0; number < end_; ++number) index(number);
    }

    static constexpr int kSmallest = 6;

    u64 seed_;
    std::vector<std::unique_ptr<Page>> pages_;
    u32* slots_ = nullptr;  // a part of the hash, and the number of an entry plus one; 0: free
    int log_ = 0;           // the number of slots is 2^log
    u32 end_ = 0, live_ = 0;
};

}  // namespace kvrouter
