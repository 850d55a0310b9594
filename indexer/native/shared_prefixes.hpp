// A radix tree of prefix hashes with the holders of each prefix (indexer/reference/shared_prefixes.py).
#pragma once

#include <algorithm>
#include <span>
#include <stdexcept>
#include <unordered_map>
#include <utility>
#include <vector>

#include "integers.hpp"

namespace kvrouter {

// For callers that hold Python's lock.
class SharedPrefixes {
   public:
    using Hashes = std::span<const u64>;

    SharedPrefixes() : edges_(1) {}

    // Return the number of a new holder.
    u32 add() {
        if (free_holders_.empty()) {
            chunks_.push_back(0);
            return static_cast<u32>(chunks_.size() - 1);
        }
        const u32 holder = free_holders_.back();
        free_holders_.pop_back();
        return holder;
    }

    // Remove a holder without prompts. Its number may be reused.
    void remove(u32 holder) {
        if (chunks(holder) > 0) throw std::invalid_argument("the holder has prompts");
        free_holders_.push_back(holder);
    }

    u64 chunks(u32 holder) const {
        if (holder >= chunks_.size()) throw std::out_of_range("no such holder");
        return chunks_[holder];
    }

    u32 parent(u32 edge) const { return at(edge).parent; }
    u32 end(u32 edge) const { return at(edge).end; }
    u32 length(u32 edge) const { return static_cast<u32>(at(edge).hashes.size()); }
    u32 count(u32 edge, u32 holder) const { return at(edge).count(holder); }

    u32 hold(u32 holder, Hashes hashes) {
        chunks(holder);
        const u32 shared = walk(hashes);
        u32 edge = path_.empty() ? kRoot : path_.back();
        if (edges_[edge].end > shared) edge = split(edge, edges_[edge].end - shared);
        if (shared < hashes.size()) {
            const u32 added = make();
            Edge& longer = edges_[added];
            longer.parent = edge;
            longer.end = static_cast<u32>(hashes.size());
            longer.hashes.assign(hashes.begin() + shared, hashes.end());
            append(edge, added);
            edge = added;
        }
        hold_edge(holder, edge);
        return edge;
    }

    void hold_edge(u32 holder, u32 edge) {
        while (edge != kRoot) {
            Edge& held = at(edge);
            const bool known = held.count(holder) > 0;
            held.add(holder);
            if (known) return;
            chunks_[holder] += held.hashes.size();
            edge = held.parent;
        }
    }

    void release(u32 holder, u32 edge) {
        while (edge != kRoot) {
            Edge& held = at(edge);
            const u32 parent = held.parent, count = held.count(holder);
            if (count == 0) throw std::invalid_argument("the holder does not hold the edge");
            held.subtract(holder);
            if (count > 1) {
                join(edge);
                return;
            }
            chunks_[holder] -= held.hashes.size();
            if (held.counts.empty()) {
                unlink(edge);
            } else {
                join(edge);
            }
            edge = parent;
        }
    }

    u32 split(u32 edge, u32 chunks) {
        if (edge == kRoot || chunks >= length(edge)) throw std::out_of_range("an edge has fewer chunks");
        const u32 added = make();
        Edge& after = edges_[edge];
        Edge& first = edges_[added];
        const auto middle = after.hashes.end() - chunks;
        first.end = after.end - chunks;
        first.hashes.assign(after.hashes.begin(), middle);
        first.counts.reserve(after.counts.size());
        for (const auto& [holder, _] : after.counts) first.counts.emplace_back(holder, 1);
        first.total = first.counts.size();
        replace(edge, added);
        after.hashes.erase(after.hashes.begin(), middle);
        append(added, edge);
        return added;
    }

    // Return the chunks of a prompt's longest prefix that each holder has, in the order of their numbers.
    const std::vector<std::pair<u32, u32>>& longest(Hashes hashes) {
        found_.clear();
        if (edges_[kRoot].first == kNone) return found_;
        const u32 shared = walk(hashes);
        for (auto each = path_.rbegin(); each != path_.rend(); ++each) {
            const Edge& edge = edges_[*each];
            if (edge.counts.size() <= found_.size()) continue;  // its holders are those of the next edge
            const u32 reach = std::min(edge.end, shared);
            merged_.clear();
            auto known = found_.begin();
            for (const auto& [holder, _] : edge.counts) {
                if (known != found_.end() && known->first == holder) {
                    merged_.push_back(*known++);
                } else {
                    merged_.emplace_back(holder, reach);
                }
            }
            found_.swap(merged_);
        }
        return found_;
    }

    u32 resumable(u32 holder, Hashes hashes, u32 window) {
        const u32 shared = walk(hashes);
        std::erase_if(path_, [&](u32 edge) { return edges_[edge].count(holder) == 0; });
        if (!path_.empty() && shared <= window && has_end(holder, path_.back(), window))
            return std::min(edges_[path_.back()].end, shared);
        for (auto each = path_.rbegin(); each != path_.rend(); ++each) {
            const Edge& edge = edges_[*each];
            bool continues = false;
            for (u32 longer = edge.first; longer != kNone && !continues; longer = edges_[longer].next)
                continues = edges_[longer].count(holder) > 0;
            if (edge.end <= shared && !(continues && edge.count(holder) == 1)) return edge.end;
        }
        return 0;
    }

    // Return the last edge of a prompt that a holder has, or the root.
    u32 longest_of(u32 holder, Hashes hashes) {
        walk(hashes);
        for (auto each = path_.rbegin(); each != path_.rend(); ++each)
            if (edges_[*each].count(holder) > 0) return *each;
        return kRoot;
    }

    u32 size() const { return static_cast<u32>(edges_.size() - 1 - free_.size()); }

    // Return whether the invariants hold (for tests).
    bool is_sound() const {
        u32 seen = 0;
        std::vector<u32> waiting{kRoot};
        while (!waiting.empty()) {
            const u32 number = waiting.back();
            const Edge& edge = edges_[number];
            waiting.pop_back();
            for (u32 each = edge.first; each != kNone; each = edges_[each].next) {
                const Edge& longer = edges_[each];
                if (longer.parent != number || longer.hashes.empty() || child(number, longer.hashes[0]) != each) return false;
                if (longer.end != edge.end + longer.hashes.size() || longer.counts.empty()) return false;
                u64 total = 0;
                for (const auto& [holder, count] : longer.counts) {
                    if (count == 0 || (number != kRoot && edge.count(holder) == 0)) return false;
                    total += count;
                }
                if (total != longer.total || is_joinable(each)) return false;
                waiting.push_back(each);
                ++seen;
            }
        }
        return seen == size();
    }

   private:
    static constexpr u32 kRoot = 0;
    static constexpr u32 kNone = ~u32{0};
    static constexpr u32 kMostEdges = 64;  // the most edges that are searched for a short prompt

    // The edges that follow one edge are a list in the order in which they were added.
    struct Edge {
        u32 parent = kNone;
        u32 end = 0;
        u32 first = kNone, last = kNone;    // of the edges that follow
        u32 before = kNone, next = kNone;   // among the edges that follow the same one
        u64 total = 0;                      // the sum of the counts
        std::vector<u64> hashes;
        std::vector<std::pair<u32, u32>> counts;  // by holder

        std::vector<std::pair<u32, u32>>::iterator place(u32 holder) {
            return std::lower_bound(
                counts.begin(), counts.end(), holder, [](const auto& each, u32 number) { return each.first < number; });
        }
        u32 count(u32 holder) const {
            const auto found = const_cast<Edge*>(this)->place(holder);
            return found != counts.end() && found->first == holder ? found->second : 0;
        }
        void add(u32 holder) {
            ++total;
            const auto found = place(holder);
            if (found != counts.end() && found->first == holder) {
                ++found->second;
            } else {
                counts.emplace(found, holder, 1);
            }
        }
        void subtract(u32 holder) {
            --total;
            const auto found = place(holder);
            if (--found->second == 0) counts.erase(found);
        }
    };

    struct Key {
        u32 edge;
        u64 hash;
        bool operator==(const Key&) const = default;
    };
    struct KeyHash {
        std::size_t operator()(const Key& key) const { return key.hash ^ key.edge * 0x9E3779B97F4A7C15ull; }
    };

    const Edge& at(u32 edge) const {
        if (edge >= edges_.size() || (edge != kRoot && edges_[edge].parent == kNone)) throw std::out_of_range("no such edge");
        return edges_[edge];
    }
    Edge& at(u32 edge) { return const_cast<Edge&>(static_cast<const SharedPrefixes*>(this)->at(edge)); }

    u32 make() {
        if (free_.empty()) {
            edges_.emplace_back();
            return static_cast<u32>(edges_.size() - 1);
        }
        const u32 edge = free_.back();
        free_.pop_back();
        return edge;
    }

    void free(u32 edge) {
        edges_[edge] = {};
        free_.push_back(edge);
    }

    u32 child(u32 edge, u64 hash) const {
        const auto found = children_.find({edge, hash});
        return found == children_.end() ? kNone : found->second;
    }

    void append(u32 parent, u32 edge) {
        Edge &above = edges_[parent], &added = edges_[edge];
        added.parent = parent;
        added.before = above.last;
        added.next = kNone;
        (above.last == kNone ? above.first : edges_[above.last].next) = edge;
        above.last = edge;
        children_[{parent, added.hashes[0]}] = edge;
    }

    // Put an edge that begins with the same hash in the place of another one.
    void replace(u32 edge, u32 other) {
        Edge &out = edges_[edge], &in = edges_[other];
        Edge& above = edges_[out.parent];
        in.parent = out.parent;
        in.before = out.before;
        in.next = out.next;
        (in.before == kNone ? above.first : edges_[in.before].next) = other;
        (in.next == kNone ? above.last : edges_[in.next].before) = other;
        children_[{in.parent, in.hashes[0]}] = other;
    }

    void unlink(u32 edge) {
        Edge& out = edges_[edge];
        Edge& above = edges_[out.parent];
        (out.before == kNone ? above.first : edges_[out.before].next) = out.next;
        (out.next == kNone ? above.last : edges_[out.next].before) = out.before;
        children_.erase({out.parent, out.hashes[0]});
        free(edge);
    }

    // Return whether only one edge follows an edge, and no prompt ends between them.
    bool is_joinable(u32 number) const {
        const Edge& edge = edges_[number];
        if (number == kRoot || edge.first == kNone || edge.first != edge.last) return false;
        return edge.counts.size() == edges_[edge.first].counts.size() && edge.counts.size() == edge.total;
    }

    void join(u32 number) {
        if (!is_joinable(number)) return;
        Edge& edge = edges_[number];
        const u32 longer = edge.first;
        Edge& after = edges_[longer];
        children_.erase({number, after.hashes[0]});
        after.hashes.insert(after.hashes.begin(), edge.hashes.begin(), edge.hashes.end());
        replace(number, longer);
        free(number);
    }

    bool has_end(u32 holder, u32 start, u32 most) const {
        std::vector<u32> waiting{start};
        for (u32 searched = 0; searched < kMostEdges && !waiting.empty(); ++searched) {
            const Edge& edge = edges_[waiting.back()];
            waiting.pop_back();
            if (edge.end > most) continue;
            const std::size_t before = waiting.size();
            for (u32 longer = edge.first; longer != kNone; longer = edges_[longer].next)
                if (edges_[longer].count(holder) > 0) waiting.push_back(longer);
            if (edge.count(holder) > waiting.size() - before) return true;
        }
        return false;
    }

    // Follow a prompt's edges into `path_`, and return how many of its chunks they contain. The last may match in part.
    u32 walk(Hashes hashes) {
        path_.clear();
        const auto length = static_cast<u32>(hashes.size());
        u32 edge = kRoot, shared = 0;
        while (shared < length) {
            const u32 longer = child(edge, hashes[shared]);
            if (longer == kNone) break;
            path_.push_back(longer);
            const Edge& here = edges_[longer];
            if (here.end > length || here.hashes.back() != hashes[here.end - 1]) return shared + common(here.hashes, hashes.subspan(shared));
            edge = longer;
            shared = here.end;
        }
        return shared;
    }

    // Return how many hashes two runs share: at least one. Equal hashes mean equal prefixes, so it is found by bisection.
    static u32 common(Hashes ours, Hashes theirs) {
        std::size_t low = 1, high = std::min(ours.size(), theirs.size());
        while (low < high) {
            const std::size_t middle = (low + high + 1) / 2;
            if (ours[middle - 1] == theirs[middle - 1]) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        return static_cast<u32>(low);
    }

    std::vector<Edge> edges_;
    std::vector<u32> free_;
    std::vector<u64> chunks_;  // by holder
    std::vector<u32> free_holders_;
    std::unordered_map<Key, u32, KeyHash> children_;  // by the edge before, and their first hash
    std::vector<u32> path_;
    std::vector<std::pair<u32, u32>> found_, merged_;
};

}  // namespace kvrouter
