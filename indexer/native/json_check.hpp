// Checks that a body is one JSON object that every JSON parser reads alike, without building objects from it.
#pragma once

#include <array>
#include <bit>
#include <charconv>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "integers.hpp"

namespace kvrouter {

// The cost of parsing a name, and a list or an object, in units of the cost of one number.
constexpr u64 kOfAName = 4, kOfAList = 8;

// A cursor over JSON's white space and strings.
struct JsonReader {
    using Bytes = signed char __attribute__((vector_size(16)));

    const char* at;
    const char* end;
    bool beyond = false;  // a string since the last reset has characters beyond ASCII

    void skip_space() {
        while (at != end && is_space(*at)) ++at;
    }

    static bool is_space(char byte) { return byte == ' ' || byte == '\n' || byte == '\r' || byte == '\t'; }

    // Skip one string. Return false if it is no string that every parser reads alike.
    bool string(bool& escaped) {
        ++at;
        while (true) {
            skip_plain();
            if (at == end) return false;
            const unsigned char byte = static_cast<unsigned char>(*at);
            if (byte == '"') {
                ++at;
                return true;
            }
            if (byte == '\\') {
                escaped = true;
                if (!escape()) return false;
            } else {
                beyond = true;
                do
                    if (byte < 0x80 || !beyond_ascii()) return false;  // a control character, or invalid UTF-8
                while (at != end && static_cast<unsigned char>(*at) >= 0x80);
            }
        }
    }

    // Skip ASCII that needs no unescaping, 16 bytes at a time.
    void skip_plain() {
        while (end - at >= 16) {
            Bytes bytes;
            std::memcpy(&bytes, at, 16);
            const auto special = (bytes < 0x20) | (bytes == '"') | (bytes == '\\');  // bytes beyond ASCII are negative
            u64 halves[2];
            std::memcpy(halves, &special, 16);
            if (halves[0] | halves[1]) {
                at += halves[0] ? first_byte(halves[0]) : 8 + first_byte(halves[1]);
                return;
            }
            at += 16;
        }
        while (at != end && is_plain(static_cast<unsigned char>(*at))) ++at;
    }

    // Return the number of the first byte, in memory order, that is not 0.
    static int first_byte(u64 bytes) {
        return (std::endian::native == std::endian::little ? std::countr_zero(bytes) : std::countl_zero(bytes)) / 8;
    }

    static bool is_plain(unsigned char byte) { return byte >= 0x20 && byte < 0x80 && byte != '"' && byte != '\\'; }

    // Skip one escape sequence. Return false if it is invalid or half of a surrogate pair.
    bool escape() {
        if (end - at < 2) return false;
        const char kind = at[1];
        at += 2;
        if (kind == 'n' || kind == '"' || kind == '\\') return true;  // nearly all escapes are of these kinds
        if (kind != 'u') return std::string_view("\"\\/bfnrt").find(kind) != std::string_view::npos;
        u32 unit = 0;
        if (!hex(unit) || (unit >= 0xDC00 && unit < 0xE000)) return false;
        if (unit < 0xD800 || unit >= 0xE000) return true;
        if (end - at < 2 || at[0] != '\\' || at[1] != 'u') return false;
        at += 2;
        return hex(unit) && unit >= 0xDC00 && unit < 0xE000;
    }

    bool hex(u32& unit) {
        if (end - at < 4) return false;
        unit = 0;
        for (int digit = 0; digit < 4; ++digit, ++at) {
            const char each = *at;
            const int value = each >= '0' && each <= '9'   ? each - '0'
                              : each >= 'a' && each <= 'f' ? each - 'a' + 10
                              : each >= 'A' && each <= 'F' ? each - 'A' + 10
                                                           : -1;
            if (value < 0) return false;
            unit = unit << 4 | static_cast<u32>(value);
        }
        return true;
    }

    // Skip one character of two to four bytes. Return false for an overlong form, a surrogate, or a code point above
    // U+10FFFF.
    bool beyond_ascii() {
        const unsigned char first = static_cast<unsigned char>(*at);
        const int length = first >= 0xC2 && first < 0xE0 ? 2 : first >= 0xE0 && first < 0xF0 ? 3 : first >= 0xF0 && first < 0xF5 ? 4 : 0;
        if (length == 0 || end - at < length) return false;
        const unsigned char second = static_cast<unsigned char>(at[1]);
        const unsigned char least = first == 0xE0 ? 0xA0 : first == 0xF0 ? 0x90 : 0x80;
        const unsigned char most = first == 0xED ? 0x9F : first == 0xF4 ? 0x8F : 0xBF;
        if (second < least || second > most) return false;
        for (int each = 2; each < length; ++each)
            if ((static_cast<unsigned char>(at[each]) & 0xC0) != 0x80) return false;
        at += length;
        return true;
    }
};

// A string in a body's bytes, without its quotes.
struct JsonText {
    const char* begin = nullptr;
    const char* end = nullptr;
    bool escaped = false;
    bool ascii = true;

    // Return the text in UTF-8. The check accepted its escape sequences.
    std::string unescaped() const {
        std::string text;
        text.reserve(static_cast<std::size_t>(end - begin));
        for (const char* at = begin; at != end;) {
            const void* found = std::memchr(at, '\\', static_cast<std::size_t>(end - at));
            const char* escape = found == nullptr ? end : static_cast<const char*>(found);
            text.append(at, escape);
            if (escape == end) break;
            at = escape + 2;
            switch (escape[1]) {
                case 'b': text += '\b'; break;
                case 'f': text += '\f'; break;
                case 'n': text += '\n'; break;
                case 'r': text += '\r'; break;
                case 't': text += '\t'; break;
                case 'u': {
                    JsonReader reader{at, end};
                    u32 point = 0, low = 0;
                    reader.hex(point);
                    if (point >= 0xD800 && point < 0xDC00) {
                        reader.at += 2;
                        reader.hex(low);
                        point = 0x10000 + ((point - 0xD800) << 10) + (low - 0xDC00);
                    }
                    append_utf8(text, point);
                    at = reader.at;
                    break;
                }
                default: text += escape[1];
            }
        }
        return text;
    }

    static void append_utf8(std::string& text, u32 point) {
        const auto add = [&](u32 byte) { text += static_cast<char>(byte); };
        if (point < 0x80) return add(point);
        if (point < 0x800) {
            add(0xC0 | point >> 6);
        } else {
            if (point < 0x10000) {
                add(0xE0 | point >> 12);
            } else {
                add(0xF0 | point >> 18);
                add(0x80 | (point >> 12 & 0x3F));
            }
            add(0x80 | (point >> 6 & 0x3F));
        }
        add(0x80 | (point & 0x3F));
    }
};

// What routing reads of a usual chat: messages of a role and a text, and only fields that do not change the prompt.
struct UsualChat {
    struct Message {
        JsonText role, content;
    };

    bool usual = true;
    JsonText model;
    std::vector<Message> messages;
    bool streamed = false;
    std::optional<long long> max_tokens, max_completion_tokens;
};

// A check that accepts only plain JSON: valid UTF-8, distinct names in each object, numbers that every parser reads
// exactly, paired surrogates, and at most `kDepth` levels. A rejected body may still be valid: a complete parser reads
// it next, and names the mistake.
class JsonCheck {
public:
    // - `names`: top-level fields whose presence makes a body be rejected.
    // - `kept`: top-level fields that `named` returns.
    // - `elements`: maximum length of a list in a top-level field, unless it is a list of numbers.
    // - `values`: maximum number of values of a body; a name counts as `kOfAName`, a list or an object as `kOfAList`.
    // - `small`: bodies of at most this number of bytes may have any number of values.
    // - `unusual`: top-level fields that a usual chat does not have.
    JsonCheck(
        std::vector<std::string> names, std::vector<std::string> kept, u64 elements, u64 values, u64 small,
        std::vector<std::string> unusual)
        : elements_(elements), values_(values), small_(small) {
        for (auto& name : names) fields_.emplace(std::move(name), false);
        for (auto& name : kept) fields_.emplace(std::move(name), true);
        for (auto& name : unusual) unusual_.insert(std::move(name));
    }

    // Return an object of a plain body's kept fields, or nothing if the body is not plain. `chat` receives what routing
    // reads of a usual chat.
    std::optional<std::string> named(std::string_view body, UsualChat* chat = nullptr) const {
        Reader reader{{body.data(), body.data() + body.size()}, body.data(), *this, {}, 0, "{", chat};
        reader.names.reserve(kUsualNames);
        reader.skip_space();
        if (reader.at == reader.end || *reader.at != '{' || !reader.object(0)) return std::nullopt;
        reader.skip_space();
        if (reader.at != reader.end || (body.size() > small_ && reader.values > values_)) return std::nullopt;
        reader.kept += '}';
        return std::move(reader.kept);
    }

private:
    static constexpr int kDepth = 64;
    static constexpr int kOfMessages = 2;  // the depth of the objects in a top-level list
    static constexpr std::size_t kUsualNames = 16;  // room reserved for the names of all open objects
    static constexpr std::size_t kNames = 64;  // limit of an object's names, as each is compared with all others
    static constexpr std::size_t kDigits = 15;  // a number of 15 characters is the same double in every parser

    struct Reader : JsonReader {
        const char* begin;
        const JsonCheck& check;
        std::vector<std::string_view> names;  // the names of all open objects, outermost first
        u64 values;
        std::string kept;  // the object of the kept fields read until now, without its closing brace
        UsualChat* chat;  // null: the body is only checked
        bool in_messages = false;

        bool next_is(char expected) {
            skip_space();
            if (at == end || *at != expected) return false;
            ++at;
            return true;
        }

        bool value(int depth) {
            skip_space();
            if (at == end) return false;
            switch (*at) {
                case '"': {
                    bool escaped = false;
                    return string(escaped);
                }
                case '{': return object(depth);
                case '[': return list(depth);
                case 't': return word("true");
                case 'f': return word("false");
                case 'n': return word("null");
                default: return number();
            }
        }

        bool object(int depth) {
            if (depth == kDepth) return false;
            ++at;
            values += kOfAList;
            const std::size_t before = names.size();
            const bool is_message = in_messages && depth == kOfMessages;
            if (is_message) chat->messages.emplace_back();
            if (!next_is('}')) {
                do {
                    skip_space();
                    const char* start = at;
                    bool keeps = false;
                    if (!name(depth, before, keeps) || !next_is(':')) return false;
                    if (is_message                      ? !message_field(names.back())
                        : chat != nullptr && depth == 0 ? !chat_field(names.back())
                                                        : !value(depth + 1))
                        return false;
                    if (keeps) {
                        if (kept.size() > 1) kept += ',';
                        kept.append(start, at);
                    }
                } while (more());
                if (!next_is('}')) return false;
            }
            names.resize(before);
            if (is_message && (!chat->messages.back().role.begin || !chat->messages.back().content.begin)) chat->usual = false;
            return true;
        }

        // Read a top-level field of a chat.
        bool chat_field(std::string_view name) {
            skip_space();
            if (name == "model" && at != end && *at == '"') return text(chat->model);
            const char* start = at;
            in_messages = name == "messages";
            if (in_messages && at != end && *at != '[') chat->usual = false;
            const bool plain = value(1);
            in_messages = false;
            if (!plain) return false;
            const std::string_view written(start, static_cast<std::size_t>(at - start));
            if (name == "stream") {
                chat->streamed = written == "true";
                if (!chat->streamed && written != "false" && written != "null") chat->usual = false;
            } else if (name == "max_tokens") {
                integer(written, chat->max_tokens);
            } else if (name == "max_completion_tokens") {
                integer(written, chat->max_completion_tokens);
            } else if (name == "model" || check.unusual_.contains(name)) {
                chat->usual = false;
            }
            return true;
        }

        // Read a field of a message of a chat.
        bool message_field(std::string_view name) {
            skip_space();
            UsualChat::Message& message = chat->messages.back();
            JsonText* part = name == "role" ? &message.role : name == "content" ? &message.content : nullptr;
            if (part != nullptr && at != end && *at == '"') return text(*part);
            chat->usual = false;
            return value(kOfMessages + 1);
        }

        bool text(JsonText& text) {
            beyond = false;
            const char* begin = at + 1;
            if (!string(text.escaped)) return false;
            text.begin = begin;
            text.end = at - 1;
            text.ascii = !beyond;
            return true;
        }

        void integer(std::string_view written, std::optional<long long>& number) {
            if (written == "null") return;
            long long read = 0;
            const auto [last, error] = std::from_chars(written.data(), written.data() + written.size(), read);
            if (error != std::errc() || last != written.data() + written.size()) chat->usual = false;
            number = read;
        }

        bool name(int depth, std::size_t before, bool& keeps) {
            const char* start = at + 1;
            bool escaped = false;
            if (at == end || *at != '"' || !string(escaped) || escaped) return false;
            const std::string_view name(start, static_cast<std::size_t>(at - start - 1));
            if (names.size() - before == kNames) return false;
            for (std::size_t each = before; each < names.size(); ++each)
                if (names[each] == name) return false;
            names.push_back(name);
            values += kOfAName;
            if (depth > 0) return true;
            const auto field = check.fields_.find(name);
            keeps = field != check.fields_.end() && field->second;
            return field == check.fields_.end() || keeps;
        }

        bool list(int depth) {
            if (depth == kDepth) return false;
            ++at;
            values += kOfAList;
            skip_space();
            if (next_is(']')) return true;
            const bool numbers = at != end && (*at == '-' || (*at >= '0' && *at <= '9'));
            u64 elements = 0;
            do {
                ++elements;
                skip_space();
                if (in_messages && depth == 1 && at != end && *at != '{') chat->usual = false;
                if (!value(depth + 1)) return false;
            } while (more());
            return next_is(']') && (depth > 1 || numbers || elements <= check.elements_);
        }

        bool more() {
            if (!next_is(',')) return false;
            ++values;
            return values <= check.values_ || static_cast<u64>(end - begin) <= check.small_;
        }

        bool word(std::string_view word) {
            if (static_cast<std::size_t>(end - at) < word.size() || std::memcmp(at, word.data(), word.size()) != 0) return false;
            at += word.size();
            return true;
        }

        bool number() {
            const char* start = at;
            if (*at == '-') ++at;
            const char* digits = at;
            skip_digits();
            if (at == digits || (*digits == '0' && at - digits > 1)) return false;
            if (at != end && *at == '.') {
                const char* fraction = ++at;
                skip_digits();
                if (at == fraction) return false;
            }
            if (at != end && (*at == 'e' || *at == 'E')) return false;
            return static_cast<std::size_t>(at - start) <= kDigits;
        }

        void skip_digits() {
            while (at != end && *at >= '0' && *at <= '9') ++at;
        }
    };

    struct Hash : std::hash<std::string_view> {
        using is_transparent = void;
    };

    std::unordered_map<std::string, bool, Hash, std::equal_to<>> fields_;  // by name: true if kept, false if rejected
    std::unordered_set<std::string, Hash, std::equal_to<>> unusual_;
    u64 elements_, values_, small_;
};

}  // namespace kvrouter
