// A reader and a writer of MessagePack, limited to the types that events and dumps use.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

#include "integers.hpp"

namespace kvrouter {

// An integer in the range of MessagePack: from -2^63 to 2^64 - 1.
struct Integer {
    u64 bits = 0;
    bool negative = false;

    bool operator==(const Integer&) const = default;
    bool positive() const { return !negative && bits != 0; }
    std::string text() const {
        return negative ? std::to_string(static_cast<std::int64_t>(bits)) : std::to_string(bits);
    }
};

// A cursor over bytes. Each `read_…` returns false for a value of another type or one that is cut off; the cursor's
// position is undefined then.
class Reader {
   public:
    Reader(const u8* begin, const u8* end) : at_(begin), end_(end) {}
    explicit Reader(std::string_view bytes)
        : Reader(reinterpret_cast<const u8*>(bytes.data()), reinterpret_cast<const u8*>(bytes.data()) + bytes.size()) {}

    const u8* at() const { return at_; }
    std::size_t left() const { return static_cast<std::size_t>(end_ - at_); }
    bool done() const { return at_ == end_; }
    u8 peek() const { return at_ < end_ ? *at_ : 0xc1; }  // MessagePack never uses 0xc1

    bool read_nil() { return peek() == 0xc0 && advance(1); }

    bool read_array(u32& count) { return read_head(count, 0x90, 0xdc); }

    bool read_map(u32& count) { return read_head(count, 0x80, 0xde); }

    bool read_text(std::string_view& text) {
        if (done()) return false;
        const u8 kind = *at_;
        u64 size;
        if ((kind & 0xe0) == 0xa0) {
            size = kind & 0x1f;
            ++at_;
        } else if (kind >= 0xd9 && kind <= 0xdb) {
            if (!read_size(kind - 0xd9, size)) return false;
        } else {
            return false;
        }
        return take(size, text);
    }

    bool read_bytes(std::string_view& bytes) {
        const u8 kind = peek();
        u64 size;
        return kind >= 0xc4 && kind <= 0xc6 && read_size(kind - 0xc4, size) && take(size, bytes);
    }

    bool read_integer(Integer& integer) {
        if (done()) return false;
        const u8 kind = *at_;
        if (kind < 0x80) {
            integer = {kind, false};
            return advance(1);
        }
        if (kind >= 0xe0) {
            integer = {static_cast<u64>(static_cast<std::int64_t>(static_cast<std::int8_t>(kind))), true};
            return advance(1);
        }
        if (kind >= 0xcc && kind <= 0xcf) {
            integer.negative = false;
            return read_size(kind - 0xcc, integer.bits);
        }
        if (kind >= 0xd0 && kind <= 0xd3) {
            const int log = kind - 0xd0;
            if (!read_size(log, integer.bits)) return false;
            const int unused = 64 - (8 << log);
            integer.bits = static_cast<u64>(static_cast<std::int64_t>(integer.bits << unused) >> unused);
            integer.negative = integer.bits >> 63;
            return true;
        }
        return false;
    }

    // Skip a number of any type. Return false if the value is no number.
    bool skip_number() {
        const u8 kind = peek();
        if (kind == 0xca) return advance(5);
        if (kind == 0xcb) return advance(9);
        Integer integer;
        return read_integer(integer);
    }

    // Skip one value of any type and depth.
    bool skip() {
        u64 values = 1;
        while (values > 0) {
            if (values > left()) return false;  // each value has at least one byte
            --values;
            const u8 kind = *at_;
            u64 size = 0;
            if (kind < 0x80 || kind >= 0xe0 || kind == 0xc0 || kind == 0xc2 || kind == 0xc3) {
                ++at_;
            } else if (kind < 0x90) {
                ++at_;
                values += 2 * (kind & 0x0fU);
            } else if (kind < 0xa0) {
                ++at_;
                values += kind & 0x0fU;
            } else if (kind < 0xc0) {
                if (!advance(1 + (kind & 0x1fU))) return false;
            } else if (kind >= 0xc4 && kind <= 0xc6) {
                if (!read_size(kind - 0xc4, size) || !advance(size)) return false;
            } else if (kind >= 0xc7 && kind <= 0xc9) {
                if (!read_size(kind - 0xc7, size) || !advance(size + 1)) return false;
            } else if (kind == 0xca || kind == 0xcb) {
                if (!advance(kind == 0xca ? 5 : 9)) return false;
            } else if (kind >= 0xcc && kind <= 0xd3) {
                if (!advance(1 + (1U << ((kind - 0xcc) & 3)))) return false;
            } else if (kind >= 0xd4 && kind <= 0xd8) {
                if (!advance(2 + (1U << (kind - 0xd4)))) return false;
            } else if (kind >= 0xd9 && kind <= 0xdb) {
                if (!read_size(kind - 0xd9, size) || !advance(size)) return false;
            } else if (kind >= 0xdc && kind <= 0xdf) {
                if (!read_size(kind & 1 ? 2 : 1, size)) return false;
                values += kind >= 0xde ? 2 * size : size;
            } else {
                return false;
            }
        }
        return true;
    }

   private:
    bool advance(u64 size) {
        if (size > left()) return false;
        at_ += size;
        return true;
    }

    // Read a type's byte and the unsigned integer of 2^log bytes (1, 2, 4 or 8) that follows.
    bool read_size(int log, u64& size) {
        const std::size_t bytes = std::size_t{1} << log;
        if (left() < 1 + bytes) return false;
        size = 0;
        for (std::size_t byte = 0; byte < bytes; ++byte) size = size << 8 | at_[1 + byte];
        at_ += 1 + bytes;
        return true;
    }

    bool read_head(u32& count, u8 small, u8 large) {
        if (done()) return false;
        const u8 kind = *at_;
        if ((kind & 0xf0) == small) {
            count = kind & 0x0f;
            ++at_;
        } else if (kind == large || kind == large + 1) {
            u64 size;
            if (!read_size(kind - large + 1, size)) return false;
            count = static_cast<u32>(size);
        } else {
            return false;
        }
        return count <= left();  // each value has at least one byte
    }

    bool take(u64 size, std::string_view& bytes) {
        if (size > left()) return false;
        bytes = {reinterpret_cast<const char*>(at_), static_cast<std::size_t>(size)};
        at_ += size;
        return true;
    }

    const u8* at_;
    const u8* end_;
};

// A writer that appends values to `bytes`, each in its shortest form.
class Writer {
   public:
    std::string bytes;

    void nil() { put(0xc0); }
    void integer(u64 value) {
        if (value < 0x80) {
            put(static_cast<u8>(value));
        } else {
            const int log = value < 0x100 ? 0 : value < 0x10000 ? 1 : value < 0x100000000 ? 2 : 3;
            put(static_cast<u8>(0xcc + log), value, 1 << log);
        }
    }
    void integer(Integer value) {
        if (!value.negative) return integer(value.bits);
        const auto number = static_cast<std::int64_t>(value.bits);
        if (number >= -32) return put(static_cast<u8>(number));
        const int log = number >= INT8_MIN ? 0 : number >= INT16_MIN ? 1 : number >= INT32_MIN ? 2 : 3;
        put(static_cast<u8>(0xd0 + log), value.bits, 1 << log);
    }
    void text(std::string_view text) {
        const u64 size = text.size();
        if (size < 32) {
            put(static_cast<u8>(0xa0 | size));
        } else {
            const int log = size < 0x100 ? 0 : size < 0x10000 ? 1 : 2;
            put(static_cast<u8>(0xd9 + log), size, 1 << log);
        }
        bytes += text;
    }
    void text_or_nil(std::string_view value) { value.data() == nullptr ? nil() : text(value); }
    void array(u64 count) {
        if (count < 16) {
            put(static_cast<u8>(0x90 | count));
        } else {
            const int log = count < 0x10000 ? 1 : 2;
            put(static_cast<u8>(0xdc + log - 1), count, 1 << log);
        }
    }
    void map(u8 count) { put(0x80 | count); }  // `count` is below 16

   private:
    void put(u8 byte) { bytes.push_back(static_cast<char>(byte)); }
    void put(u8 kind, u64 value, int count) {
        put(kind);
        while (count-- > 0) put(static_cast<u8>(value >> (8 * count)));
    }
};

// Return whether bytes are UTF-8 that Python decodes without an error.
inline bool is_utf8(std::string_view text) {
    const auto* at = reinterpret_cast<const u8*>(text.data());
    const auto* end = at + text.size();
    while (at < end) {
        if (*at < 0x80) {
            ++at;
            continue;
        }
        const int more = *at >= 0xc2 && *at < 0xe0 ? 1 : (*at & 0xf0) == 0xe0 ? 2 : *at >= 0xf0 && *at < 0xf5 ? 3 : 0;
        if (more == 0 || end - at <= more) return false;
        for (int byte = 1; byte <= more; ++byte)
            if ((at[byte] & 0xc0) != 0x80) return false;
        if ((*at == 0xe0 && at[1] < 0xa0) || (*at == 0xed && at[1] > 0x9f)) return false;
        if ((*at == 0xf0 && at[1] < 0x90) || (*at == 0xf4 && at[1] > 0x8f)) return false;
        at += more + 1;
    }
    return true;
}

}  // namespace kvrouter
