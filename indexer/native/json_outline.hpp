// Shortens a long JSON body by leaving out the contents of its strings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "json_check.hpp"

namespace kvrouter {

// The position of an object's field in the body's bytes.
struct JsonField {
    std::size_t name, name_end, value, value_end;
};

// A body's JSON with `""` in place of every string that is no name, and the positions of the outermost fields. Only
// strings are parsed, so the outline of invalid JSON is invalid too.
class JsonOutline {
public:
    std::string text;
    std::vector<JsonField> fields;
    // The number of values, counted as `JsonCheck` does, plus one for each eight bytes of a number.
    u64 values = 0;

    // Read a body. Return false if parsers may disagree about one of its strings. Reading stops after `most` values.
    bool read(std::string_view body, u64 most) {
        JsonReader in{body.data(), body.data() + body.size()};
        const char* last = in.at;  // the end of the last token that is not white space
        const auto place = [&](const char* at) { return static_cast<std::size_t>(at - body.data()); };
        int depth = 0;
        bool open = false;  // the value of an outermost field is being read
        while (in.at != in.end && values <= most) {
            const char* start = in.at;
            const char byte = *start;
            if (JsonReader::is_space(byte)) {
                in.skip_space();
                text += ' ';
                continue;
            }
            if (byte == '"') {
                bool escaped = false;
                if (!in.string(escaped)) return false;
                last = in.at;
                in.skip_space();
                if (in.at != in.end && *in.at == ':') {
                    text.append(start, last);
                    values += kOfAName;
                    if (depth == 1 && !open) {
                        fields.push_back({place(start), place(last), 0, 0});
                        ++in.at;
                        in.skip_space();
                        text += ':';
                        last = in.at;  // in invalid JSON the value may be missing
                        fields.back().value = place(last);
                        open = true;
                    }
                } else {
                    text += "\"\"";
                }
                continue;
            }
            if (depth == 1 && open && (byte == ',' || byte == '}')) {
                fields.back().value_end = place(last);
                open = false;
            }
            if (is_mark(byte)) {
                ++in.at;
                text += byte;
                values += byte == ',' ? 1 : byte == '{' || byte == '[' ? kOfAList : 0;
                depth += byte == '{' || byte == '[' ? 1 : byte == '}' || byte == ']' ? -1 : 0;
            } else {
                while (in.at != in.end && !is_mark(*in.at) && *in.at != '"' && !JsonReader::is_space(*in.at)) ++in.at;
                text.append(start, in.at);
                values += static_cast<u64>(in.at - start) / 8;
            }
            last = in.at;
        }
        return true;
    }

private:
    static bool is_mark(char byte) {
        return byte == ',' || byte == ':' || byte == '{' || byte == '}' || byte == '[' || byte == ']';
    }
};

}  // namespace kvrouter
