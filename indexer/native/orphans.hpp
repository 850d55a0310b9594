// Orphans: stored events whose parent is unknown. A limited number waits for it (indexer/reference/orphans.py).
#pragma once

#include <list>
#include <string>
#include <unordered_map>

#include "events.hpp"
#include "tree.hpp"

namespace kvrouter {

// The key of a name in hash tables. The digest of a name that is bytes has a secret seed.
struct NameHash {
    std::size_t operator()(const Name& name) const { return mixed(name.key ^ seed); }
    u64 seed;
};

// A removal of a waiting block, with its count.
struct Removal {
    Name name;
    Integer group;
    std::string medium;
    u64 times;
};

struct Orphan {
    std::string event;  // the encoded event
    bool trusted;       // see `Decoder`
    Name parent;
    std::vector<Name> names;
    std::vector<Removal> removals;
    std::unordered_map<u64, std::size_t> removal_at;  // by the digest of all but `times`
    std::string medium;

    std::size_t size() const { return names.size() + removals.size(); }
    std::size_t bytes() const { return event.size() + size() * 64; }
};

class Orphans {
   public:
    using List = std::vector<std::unique_ptr<Orphan>>;

    // At most `limit` blocks and removals, and some bytes for each.
    Orphans(std::size_t limit, u64 seed)
        : seed_(seed), limit_(limit), by_parent_(8, NameHash{seed}), by_block_(8, NameHash{seed}) {}

    std::size_t size() const { return by_block_.size(); }
    std::size_t limit() const { return limit_; }

    void clear() {
        groups_.clear();
        by_parent_.clear();
        by_block_.clear();
        size_ = bytes_ = 0;
    }

    // Returns the number of older blocks that were dropped.
    u64 park(std::unique_ptr<Orphan> orphan) {
        const auto [found, added] = by_parent_.try_emplace(orphan->parent);
        if (added) found->second = groups_.insert(groups_.end(), Group{orphan->parent, {}});
        for (const Name& name : orphan->names) by_block_[name] = orphan.get();
        size_ += orphan->size();
        bytes_ += orphan->bytes();
        found->second->orphans.push_back(std::move(orphan));
        return keep_limit();
    }

    // Remove and return the events whose parent is this block.
    void adopt(const Name& parent, List& adopted) {
        const auto found = by_parent_.find(parent);
        if (found == by_parent_.end()) return;
        auto group = found->second;
        by_parent_.erase(found);
        for (auto& orphan : group->orphans) {
            size_ -= orphan->size();
            bytes_ -= orphan->bytes();
            for (const Name& name : orphan->names) {
                const auto waiting = by_block_.find(name);
                if (waiting != by_block_.end() && waiting->second == orphan.get()) by_block_.erase(waiting);
            }
            adopted.push_back(std::move(orphan));
        }
        groups_.erase(group);
    }

    // Record removals of a waiting block. Returns false if it does not wait here. Older blocks may be dropped.
    bool remove(const Name& name, const Integer& group, std::string_view medium, u64 times, u64& dropped) {
        const auto found = by_block_.find(name);
        if (found == by_block_.end()) return false;
        Orphan& orphan = *found->second;
        const u64 parts[] = {name.key, name.kind, group.bits, group.negative};
        const u64 digest = xxh3::hash(medium.data(), medium.size(), xxh3::hash(parts, sizeof parts, seed_));
        const auto [at, added] = orphan.removal_at.try_emplace(digest, orphan.removals.size());
        if (!added) {
            orphan.removals[at->second].times += times;
            return true;
        }
        bytes_ -= orphan.bytes();
        orphan.removals.push_back({{name.key, {}, name.kind}, group, std::string(medium), times});
        bytes_ += orphan.bytes();
        ++size_;
        dropped += keep_limit();
        return true;
    }

    void clear_medium(std::string_view medium) {
        List waiting;
        while (!groups_.empty()) adopt(Name(groups_.front().parent), waiting);
        for (auto& orphan : waiting)
            if (orphan->medium != medium) park(std::move(orphan));
    }

   private:
    struct Group {
        Name parent;
        List orphans;
    };

    static constexpr std::size_t kBytesABlock = 1024;

    u64 keep_limit() {
        u64 dropped = 0;
        while (size_ > limit_ || bytes_ > limit_ * kBytesABlock) {
            List gone;
            adopt(Name(groups_.front().parent), gone);
            for (const auto& orphan : gone) dropped += orphan->names.size();
        }
        return dropped;
    }

    u64 seed_;
    std::size_t limit_, size_ = 0, bytes_ = 0;
    std::list<Group> groups_;  // the oldest first
    std::unordered_map<Name, std::list<Group>::iterator, NameHash> by_parent_;
    std::unordered_map<Name, Orphan*, NameHash> by_block_;
};

}  // namespace kvrouter
