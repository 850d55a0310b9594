// Dump and restoration of a target's blocks: MessagePack of the runs and holders in indexer/dump.py.
#pragma once

#include <charconv>
#include <unordered_set>

#include "holdings.hpp"

namespace kvrouter {

inline std::string written_bytes(std::string_view bytes) {
    std::string text = "hex:";
    for (const char byte : bytes) {
        text += "0123456789abcdef"[static_cast<u8>(byte) >> 4];
        text += "0123456789abcdef"[byte & 15];
    }
    return text;
}

inline void write_name(Writer& out, const NameTable& names, u32 number) {
    const NameTable::Entry& entry = names.entry(number);
    if (entry.kind == Name::kBytes) {
        out.text(written_bytes(names.bytes(number)));
    } else {
        out.integer(Integer{entry.key, entry.kind == Name::kNegative});
    }
}

// Return `[runs, holders]` as MessagePack. The caller owns the target.
inline std::string dump(const Holdings& holdings, Shared& shared) {
    Writer out;
    Turns turns(shared.lock);
    std::unordered_map<u32, u32> places;  // the place of each run in the dump
    std::vector<std::pair<u32, u32>> runs;  // by depth: parents first
    for (const Holder* holder : holdings.holders()) {
        for (u32 number = 0; number < holder->names.end(); ++number) {
            const NameTable::Entry& entry = holder->names.entry(number);
            if (NameTable::is_gap(entry)) continue;
            for (u32 run = entry.run; run != kRoot && places.try_emplace(run).second; run = shared.tree.run(run).parent)
                runs.emplace_back(shared.tree.run(run).depth, run);
            turns.did(1);
        }
    }
    std::sort(runs.begin(), runs.end());
    for (u32 place = 0; place < runs.size(); ++place) places[runs[place].second] = place;
    out.array(2);
    out.array(runs.size());
    for (const auto& [depth, number] : runs) {
        const Run& run = shared.tree.run(number);
        const bool starts = run.parent == kRoot;
        out.array(3);
        out.integer(Integer{starts ? ~u64{0} : places[run.parent], starts});
        const auto offset = static_cast<std::int64_t>(depth) - shared.tree.run(run.parent).depth - 1;
        out.integer(Integer{static_cast<u64>(offset), offset < 0});
        out.array(run.size);
        for (u32 block = 0; block < run.size; ++block) out.integer(run.hashes[block]);
        turns.did(run.size);
    }
    out.array(holdings.holders().size());
    for (const Holder* holder : holdings.holders()) {
        out.map(5);
        out.text("group");
        out.integer(holder->group);
        out.text("medium");
        out.text(holder->medium);
        out.text("window");
        holder->windowed ? out.integer(holder->window) : out.nil();
        out.text("blocks");
        out.array(holder->names.size());
        u32 copied = 0;
        for (u32 number = 0; number < holder->names.end(); ++number) {
            const NameTable::Entry& entry = holder->names.entry(number);
            if (NameTable::is_gap(entry)) continue;
            copied += entry.copies > 0;
            out.array(3);
            write_name(out, holder->names, number);
            out.integer(places[entry.run]);
            out.integer(u64{entry.offset});
            turns.did(1);
        }
        out.text("copies");
        out.array(copied);
        for (u32 number = 0; number < holder->names.end() && copied > 0; ++number) {
            const NameTable::Entry& entry = holder->names.entry(number);
            if (NameTable::is_gap(entry) || entry.copies == 0) continue;
            out.array(2);
            write_name(out, holder->names, number);
            out.integer(u64{entry.copies});
        }
    }
    return std::move(out.bytes);
}

// Reader of a dump, written by `dump` or by msgspec. The caller owns the target, which has no blocks.
class Restoring {
   public:
    Restoring(Holdings& holdings, Shared& shared, std::string_view bytes)
        : holdings_(holdings), shared_(shared), in_(bytes), turns_(shared.lock) {}

    // Returns false for an invalid dump; a part of it may be restored then.
    bool restore() {
        u32 fields;
        bool whole = in_.read_array(fields) && fields == 2 && read_runs();
        try {
            whole = whole && read_holders() && in_.done();
        } catch (const UnusableEvent&) {
            whole = false;
        }
        for (auto run = spans_.rbegin(); run != spans_.rend(); ++run)  // children first
            if (!run->empty()) shared_.tree.release(run->back().run);
        return whole;
    }

   private:
    bool read_runs() {
        u32 count, fields, blocks;
        if (!in_.read_array(count)) return false;
        std::vector<u64> hashes;
        for (u32 number = 0; number < count; ++number) {
            Integer parent, offset, hash;
            if (!in_.read_array(fields) || fields != 3 || !in_.read_integer(parent) || !in_.read_integer(offset) ||
                !in_.read_array(blocks))
                return false;
            hashes.clear();
            for (u32 block = 0; block < blocks; ++block) {
                if (!in_.read_integer(hash) || hash.negative) return false;
                hashes.push_back(hash.bits);
            }
            Place at{kRoot, 0};
            std::int64_t behind = -1;
            if (!parent.negative) {
                const auto found = place(parent, offset);
                if (!found) return false;
                at = *found;
                behind = at.offset;
            }
            spans_.emplace_back();
            for (std::size_t done = 0; done < hashes.size();) {
                const Span span = shared_.tree.insert(at.run, behind, hashes.data() + done, hashes.size() - done);
                spans_.back().push_back(span);
                at.run = span.run;
                behind = span.start + span.count - 1;
                done += span.count;
            }
            // The turn must not end before the blocks are held, because another thread could free them.
        }
        return true;
    }

    bool read_holders() {
        u32 count, fields;
        if (!in_.read_array(count)) return false;
        for (u32 number = 0; number < count; ++number) {
            Integer group, window;
            std::string_view field, medium;
            bool windowed = false;
            Reader blocks(nullptr, nullptr), copies(nullptr, nullptr);
            if (!in_.read_map(fields)) return false;
            for (; fields > 0; --fields) {
                if (!in_.read_text(field)) return false;
                bool read = true;
                if (field == "group") {
                    read = in_.read_integer(group);
                } else if (field == "medium") {
                    read = in_.read_text(medium);
                } else if (field == "window") {
                    windowed = !in_.read_nil();
                    read = !windowed || (in_.read_integer(window) && !window.negative);
                } else if (field == "blocks") {
                    blocks = in_;
                    read = in_.skip();
                } else if (field == "copies") {
                    copies = in_;
                    read = in_.skip();
                } else {
                    read = in_.skip();
                }
                if (!read) return false;
            }
            u32 held, copied;
            if (!blocks.read_array(held) || !copies.read_array(copied)) return false;
            Holder& holder = holdings_.restored_holder(
                group, medium, windowed ? std::optional(window.bits) : std::nullopt, held);
            if (!read_blocks(holder, blocks, held) || !read_copies(holder, copies, copied)) return false;
        }
        return true;
    }

    bool read_blocks(Holder& holder, Reader& in, u32 count) {
        u32 fields;
        Integer number, offset;
        for (u32 index = 0; index < count; ++index) {
            Name name;
            if (!in.read_array(fields) || fields != 3 || !read_name(in, name) || !in.read_integer(number) ||
                !in.read_integer(offset))
                return false;
            const auto found = place(number, offset);
            if (!found) return false;
            holdings_.restore_block(holder, name, *found);
        }
        return true;
    }

    bool read_copies(Holder& holder, Reader& in, u32 count) {
        u32 fields;
        Integer copies;
        for (u32 index = 0; index < count; ++index) {
            Name name;
            if (!in.read_array(fields) || fields != 2 || !read_name(in, name) || !in.read_integer(copies)) return false;
            if (copies.negative) return false;
            if (auto* entry = holder.names.find(name))
                entry->copies = static_cast<u32>(std::min<u64>(copies.bits, NameTable::kMostCopies)) & NameTable::kMostCopies;
        }
        return true;
    }

    bool read_name(Reader& in, Name& name) {
        Integer number;
        if (in.read_integer(number)) {
            name = {number.bits, {}, number.negative ? Name::kNegative : Name::kNumber};
            return true;
        }
        std::string_view text;
        if (!in.read_text(text)) return false;
        if (text.starts_with("hex:")) text.remove_prefix(4);
        if (text.size() % 2 != 0) return false;
        name_.clear();
        for (std::size_t at = 0; at < text.size(); at += 2) {
            u8 byte;
            const auto read = std::from_chars(text.data() + at, text.data() + at + 2, byte, 16);
            if (read.ptr != text.data() + at + 2 || read.ec != std::errc{}) return false;
            name_ += static_cast<char>(byte);
        }
        name = {xxh3::hash(name_.data(), name_.size(), shared_.seed), name_, Name::kBytes};
        return true;
    }

    std::optional<Place> place(const Integer& number, const Integer& offset) const {
        if (number.negative || offset.negative || number.bits >= spans_.size()) return std::nullopt;
        u64 left = offset.bits;
        for (const Span& span : spans_[number.bits]) {
            if (left < span.count) return Place{span.run, span.start + static_cast<u32>(left)};
            left -= span.count;
        }
        return std::nullopt;
    }

    Holdings& holdings_;
    Shared& shared_;
    Reader in_;
    Turns turns_;
    std::vector<std::vector<Span>> spans_;  // by run of the dump
    std::string name_;                      // the last name that is bytes
};

}  // namespace kvrouter
