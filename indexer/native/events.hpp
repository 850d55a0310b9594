// Event batches from MessagePack: `[time, events, rank]`, each event a tagged map or a tagged array (kvevents/events.py).
//
// The results equal those of kvevents/batches.py, which decodes everything else: an event that this code cannot read is
// FOREIGN, and a batch that it cannot read is rejected as a whole.
#pragma once

#include <algorithm>
#include <bit>
#include <string_view>
#include <tuple>
#include <vector>

#include "media.hpp"
#include "msgpack.hpp"
#include "xxh3.hpp"

namespace kvrouter {

// An engine's name of a block: a number, or bytes, which are represented by a digest with a secret seed.
struct Name {
    enum Kind : u8 { kNumber, kNegative, kBytes };

    u64 key = 0;
    std::string_view bytes;  // the name, if it is bytes; points into the payload
    Kind kind = kNumber;

    bool operator==(const Name& other) const { return key == other.key && kind == other.kind; }
};

enum class EventKind : u8 { kStored, kRemoved, kCleared, kForeign };
enum class GroupKind : u8 { kWhole, kSliding, kState, kUnknown };

struct Range {
    u32 first = 0, count = 0;
};

struct Event {
    EventKind kind = EventKind::kForeign;
    GroupKind group_kind = GroupKind::kWhole;
    bool has_parent = false, has_lora_id = false, has_window = false, has_hashes = false, has_keys = false;
    bool tokens_fit = true;  // each is an unsigned 32-bit number
    bool trusted = false;    // see `Decoder`
    Name parent;
    Range names, tokens;
    Range keys;  // one list of extra keys per block; no lists if all are empty
    Integer block_size, lora_id, group, window;
    std::string_view medium, lora_name, cache_salt, locality;  // null data: absent
    std::string_view raw;                                      // the event's bytes, unchanged

    // Return whether other workers can load the event's blocks too, so that they are not the worker's own.
    bool is_pooled() const {
        const Medium* known = medium_named(medium);
        return (known != nullptr && known->pooled) || locality == "REMOTE";
    }

    // Return whether the event has the whole identity of its blocks, so that their tokens show their prefix.
    bool is_identified() const {
        const Medium* known = medium_named(medium);
        return has_keys || cache_salt.data() != nullptr || medium.empty() || (known != nullptr && known->identified);
    }
};

// Arrays that all events of a batch share.
struct Batch {
    std::vector<Event> events;
    std::vector<Name> names;
    std::vector<u32> tokens;
    std::vector<Range> keys;                 // by block: a range of `key_parts`
    std::vector<std::string_view> key_parts;  // encoded values

    void clear() {
        events.clear();
        names.clear();
        tokens.clear();
        keys.clear();
        key_parts.clear();
        if (tokens.capacity() > kKeptTokens) *this = {};  // the memory of a large batch is not kept
    }

   private:
    static constexpr std::size_t kKeptTokens = 1 << 18;
};

class Decoder {
   public:
    // - `seed`: seed of the digests of names.
    // - `trusted`: msgspec encoded the events, so that each value has its only form and each text is UTF-8.
    Decoder(Batch& batch, u64 seed, bool trusted) : batch_(batch), seed_(seed), trusted_(trusted) {}

    // Returns false if the payload is not a batch of a known form.
    bool decode_batch(std::string_view payload) {
        Reader in(payload);
        u32 fields, count, more;
        if (payload.size() > kMostBytes || !in.read_array(fields) || fields < 2) return false;
        if (!in.skip_number() || !in.read_array(count) || count > most_events(payload.size())) return false;
        for (u32 number = 0; number < count; ++number)
            if (!decode_event(in)) return false;
        Integer rank;
        if (fields > 2 && !in.read_nil() && !in.read_integer(rank)) return false;
        for (more = 3; more < fields; ++more)
            if (!in.skip()) return false;
        return in.done();
    }

    // Returns false if the bytes are cut off. An event of an unknown form is foreign.
    bool decode_event(Reader& in) {
        const u8* begin = in.at();
        batch_.events.emplace_back();
        Event& event = batch_.events.back();
        const auto marks = std::tuple(batch_.names.size(), batch_.tokens.size(), batch_.keys.size());
        Reader whole = in;
        u32 count;
        bool known = in.read_map(count) ? read_map(in, event, count) : in.read_array(count) && read_array(in, event, count);
        if (!known) {
            event = {};
            batch_.names.resize(std::get<0>(marks));
            batch_.tokens.resize(std::get<1>(marks));
            batch_.keys.resize(std::get<2>(marks));
            in = whole;
            if (!in.skip()) return false;
        }
        event.trusted = trusted_;
        event.raw = {reinterpret_cast<const char*>(begin), static_cast<std::size_t>(in.at() - begin)};
        return true;
    }

   private:
    bool read_map(Reader& in, Event& event, u32 count) {
        std::string_view field, kind;
        // msgspec writes the tag first.
        if (count == 0 || !in.read_text(field) || field != "type" || !in.read_text(kind)) return false;
        if (!read_kind(kind, event)) return false;
        for (u32 number = 1; number < count; ++number)
            if (!in.read_text(field) || field == "type" || !read_field(in, event, field)) return false;
        return event.has_hashes || event.kind == EventKind::kCleared;
    }

    bool read_kind(std::string_view kind, Event& event) {
        if (kind == "BlockStored") {
            event.kind = EventKind::kStored;
        } else if (kind == "BlockRemoved") {
            event.kind = EventKind::kRemoved;
        } else if (kind == "AllBlocksCleared") {
            event.kind = EventKind::kCleared;
        } else {
            return false;
        }
        return true;
    }

    bool read_field(Reader& in, Event& event, std::string_view field) {
        if (field == "medium") return read_medium(in, event);
        if (event.kind != EventKind::kCleared) {
            if (field == "block_hashes") return read_names(in, event);
            if (field == "group_idx") return read_group(in, event);
        }
        if (event.kind != EventKind::kStored) return in.skip();
        if (field == "token_ids") return read_tokens(in, event);
        if (field == "block_size") return in.read_integer(event.block_size);
        if (field == "parent_block_hash") return read_parent(in, event);
        if (field == "lora_id") return read_lora_id(in, event);
        if (field == "lora_name") return read_text(in, event.lora_name);
        if (field == "extra_keys") return read_keys(in, event);
        if (field == "kv_cache_spec_kind") return read_group_kind(in, event);
        if (field == "kv_cache_spec_sliding_window") return read_window(in, event);
        if (field == "cache_salt") return read_text(in, event.cache_salt);
        if (field == "locality") return read_text(in, event.locality);
        std::string_view unused;
        return field == "session_id" ? read_text(in, unused) : in.skip();
    }

    bool read_array(Reader& in, Event& event, u32 count) {
        std::string_view kind;
        if (count == 0 || !in.read_text(kind) || !read_kind(kind, event)) return false;
        for (u32 place = 1; place < count; ++place)
            if (!read_place(in, event, place)) return false;
        return event.has_hashes || event.kind == EventKind::kCleared;
    }

    bool read_place(Reader& in, Event& event, u32 place) {
        if (event.kind == EventKind::kCleared) return place == 1 ? read_medium(in, event) : in.skip();
        if (place == 1) return read_names(in, event);
        if (event.kind == EventKind::kRemoved) {
            if (place == 2) return read_medium(in, event);
            return place == 3 ? read_group(in, event) : in.skip();
        }
        switch (place) {
            case 2: return read_parent(in, event);
            case 3: return read_tokens(in, event);
            case 4: return in.read_integer(event.block_size);
            case 5: return read_lora_id(in, event);
            case 6: return read_medium(in, event);
            case 7: return read_text(in, event.lora_name);  // SGLang's map with a salt is foreign
            case 8: return read_keys(in, event);
            case 9: return read_group(in, event);
            case 10: return read_group_kind(in, event);
            case 11: return read_window(in, event);
            default: return in.skip();
        }
    }

    bool read_name(Reader& in, Name& name) {
        Integer number;
        if (in.read_integer(number)) {
            name = {number.bits, {}, number.negative ? Name::kNegative : Name::kNumber};
            return true;
        }
        if (!in.read_bytes(name.bytes)) return false;
        name.key = xxh3::hash(name.bytes.data(), name.bytes.size(), seed_);
        name.kind = Name::kBytes;
        return true;
    }

    bool read_names(Reader& in, Event& event) {
        u32 count;
        if (!in.read_array(count)) return false;
        event.names = {static_cast<u32>(batch_.names.size()), count};
        batch_.names.resize(batch_.names.size() + count);
        Name* name = batch_.names.data() + event.names.first;
        for (u32 number = 0; number < count; ++number)
            if (!read_name(in, *name++)) return false;
        event.has_hashes = true;
        return true;
    }

    bool read_parent(Reader& in, Event& event) {
        event.has_parent = !in.read_nil();
        return !event.has_parent || read_name(in, event.parent);
    }

    bool read_tokens(Reader& in, Event& event) {
        u32 count;
        if (!in.read_array(count)) return false;
        event.tokens = {static_cast<u32>(batch_.tokens.size()), count};
        event.tokens_fit = true;
        batch_.tokens.resize(batch_.tokens.size() + count);
        u32* token = batch_.tokens.data() + event.tokens.first;
        const u8* at = in.at();
        const u8* end = at + in.left();
        for (u32* last = token + count; token < last; ++token) {
            const auto left = end - at;
            if (left > 0 && *at < 0x80) {
                *token = *at++;
            } else if (left > 2 && *at == 0xcd) {
                *token = static_cast<u32>(at[1] << 8 | at[2]);
                at += 3;
            } else if (left > 4 && *at == 0xce) {
                *token = static_cast<u32>(at[1]) << 24 | static_cast<u32>(at[2] << 16 | at[3] << 8 | at[4]);
                at += 5;
            } else if (left > 1 && *at == 0xcc) {
                *token = at[1];
                at += 2;
            } else {
                Reader rest(at, end);
                Integer number;
                if (!rest.read_integer(number)) return false;
                event.tokens_fit &= !number.negative && number.bits >> 32 == 0;
                *token = static_cast<u32>(number.bits);
                at = rest.at();
            }
        }
        in = Reader(at, end);
        if constexpr (std::endian::native == std::endian::big)
            for (u32* swapped = token - count; swapped < token; ++swapped) *swapped = xxh3::swap32(*swapped);
        return true;
    }

    bool read_text(Reader& in, std::string_view& text) {
        if (in.read_nil()) {
            text = {};
            return true;
        }
        return in.read_text(text) && (trusted_ || is_utf8(text));
    }

    bool read_medium(Reader& in, Event& event) {
        const bool read = read_text(in, event.medium);
        event.medium = canonical_medium(event.medium);
        return read;
    }

    bool read_lora_id(Reader& in, Event& event) {
        event.has_lora_id = !in.read_nil();
        return !event.has_lora_id || in.read_integer(event.lora_id);
    }

    bool read_window(Reader& in, Event& event) {
        event.has_window = !in.read_nil();
        return !event.has_window || in.read_integer(event.window);
    }

    bool read_group(Reader& in, Event& event) {
        event.group = {};
        return in.read_nil() || in.read_integer(event.group);
    }

    bool read_group_kind(Reader& in, Event& event) {
        std::string_view kind;
        if (!read_text(in, kind)) return false;
        if (kind.data() == nullptr || kind == "full_attention" || kind == "mla_attention" ||
            kind == "sink_full_attention") {
            event.group_kind = GroupKind::kWhole;
        } else if (kind == "sliding_window" || kind == "sliding_window_mla") {
            event.group_kind = GroupKind::kSliding;
        } else {
            event.group_kind =
                kind == "mamba" || kind == "linear_attention" ? GroupKind::kState : GroupKind::kUnknown;
        }
        return true;
    }

    bool read_keys(Reader& in, Event& event) {
        event.keys = {};
        event.has_keys = !in.read_nil();
        if (!event.has_keys) return true;
        u32 blocks;
        if (!in.read_array(blocks)) return false;
        event.keys = {static_cast<u32>(batch_.keys.size()), blocks};
        bool any = false;
        for (u32 block = 0; block < blocks; ++block) {
            Range parts{static_cast<u32>(batch_.key_parts.size()), 0};
            if (!in.read_nil()) {
                if (!in.read_array(parts.count)) return false;
                for (u32 part = 0; part < parts.count; ++part)
                    if (!read_key(in)) return false;
            }
            any |= parts.count > 0;
            batch_.keys.push_back(parts);
        }
        if (!any) {
            batch_.keys.resize(event.keys.first);
            event.keys = {};
        }
        return true;
    }

    bool read_key(Reader& in) {
        const u8* begin = in.at();
        if (!(trusted_ ? in.skip() : skip_plain(in, kDeepestKey))) return false;
        batch_.key_parts.emplace_back(reinterpret_cast<const char*>(begin), static_cast<std::size_t>(in.at() - begin));
        return true;
    }

    // Read a value that msgspec would encode to the same bytes: text, bytes, numbers and lists of them.
    static bool skip_plain(Reader& in, int deepest) {
        const u8* begin = in.at();
        const u8 kind = in.peek();
        Writer again;
        Integer number;
        u32 count;
        if (kind == 0xc0 || kind == 0xc2 || kind == 0xc3 || kind == 0xcb) return in.skip();
        if (in.read_integer(number)) {
            again.integer(number);
        } else if (std::string_view text; in.read_text(text)) {
            if (!is_utf8(text)) return false;
            return static_cast<u64>(in.at() - begin) == text.size() + head_size(text.size());
        } else if (std::string_view bytes; in.read_bytes(bytes)) {
            const u64 head = bytes.size() < 0x100 ? 2 : bytes.size() < 0x10000 ? 3 : 5;
            return static_cast<u64>(in.at() - begin) == bytes.size() + head;
        } else if (deepest > 0 && in.read_array(count)) {
            again.array(count);
            if (static_cast<std::size_t>(in.at() - begin) != again.bytes.size()) return false;
            for (u32 value = 0; value < count; ++value)
                if (!skip_plain(in, deepest - 1)) return false;
            return true;
        } else {
            return false;
        }
        return static_cast<std::size_t>(in.at() - begin) == again.bytes.size();
    }

    static u64 head_size(u64 size) { return size < 32 ? 1 : size < 0x100 ? 2 : size < 0x10000 ? 3 : 5; }

    // Maximum number of events in a payload, to bound the memory for them. The shortest event has more than 16 bytes.
    static constexpr u64 most_events(u64 bytes) { return std::max<u64>(bytes / 16, 1024); }

    static constexpr u64 kMostBytes = u64{1} << 30;
    static constexpr int kDeepestKey = 8;

    Batch& batch_;
    u64 seed_;
    bool trusted_;
};

}  // namespace kvrouter
