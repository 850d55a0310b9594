// Engines' names of the blocks that somebody holds, each with its place in the tree, in the order they came.
//
// Entries stand one behind another; an index of numbers finds them: open addressing, with as many bits of a name's hash
// as a slot has left. An entry that is taken out leaves a gap until all are moved together.
#pragma once

#include <vector>

#include "events.hpp"
#include "tree.hpp"

namespace kvrouter {

// A block of a run.
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
        u32 kind : 2;    // of Name; kGone: a gap
        u32 copies : 20;  // beyond the first; so many are not told apart any more
    };
    static constexpr u32 kMostCopies = (1u << 20) - 1;

    explicit NameTable(u64 seed) : seed_(seed) {}
    NameTable(const NameTable&) = delete;
    NameTable& operator=(const NameTable&) = delete;
    ~NameTable() { std::free(slots_); }

    u32 size() const { return live_; }
    u32 end() const { return end_; }  // of the entries, with gaps

    Entry& entry(u32 number) { return pages_[number / kPage]->entries[number % kPage]; }
    const Entry& entry(u32 number) const { return pages_[number / kPage]->entries[number % kPage]; }
    static bool is_gap(const Entry& entry) { return entry.kind == kGone; }

    // The bytes of a name that is no number.
    std::string_view bytes(u32 number) const { return pages_[number / kPage]->long_names[number % kPage]; }

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
        asm volatile("");  // else GCC finds no effect, and leaves the calls out
    }

    // Make room for so many more names. Takes as long as there are names.
    void reserve(std::size_t more) {
        if (end_ + more > limit()) rebuild(live_ + more);
    }

    // Add a name that is not there; there is room for it.
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

    // Give back memory when most entries are gaps.
    void shrink() {
        if (end_ > kPage && live_ < end_ / 4) rebuild(live_);
    }

    // Of a table that is given up: only its entries are wanted any more.
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

    // Close the gaps, and make the index as large as so many names need, and some more.
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
    u32* slots_ = nullptr;  // a tag and the number of an entry, from 1; 0 is free
    int log_ = 0;           // the number of slots is 2^log
    u32 end_ = 0, live_ = 0;
};

}  // namespace kvrouter
