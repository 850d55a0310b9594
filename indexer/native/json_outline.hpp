// What a long body holds beside the contents of its strings.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "json_check.hpp"

namespace kvrouter {

// Where a field of an object is in its bytes.
struct JsonField {
    std::size_t name, name_end, value, value_end;
};

// The same JSON with `""` for every string that is no name, and its outermost fields. Of the grammar it knows only where
// strings begin and end: what is no JSON has an outline that is none.
class JsonOutline {
public:
    std::string text;
    std::vector<JsonField> fields;
    // As `JsonCheck` counts them, and long numbers as one more for each eight bytes.
    u64 values = 0;

    // False where a string is not as every parser reads it. Beyond `most` values it stops.
    bool read(std::string_view body, u64 most) {
        JsonReader in{body.data(), body.data() + body.size()};
        const char* last = in.at;  // the end of what was read, but for white space
        const auto place = [&](const char* at) { return static_cast<std::size_t>(at - body.data()); };
        int depth = 0;
        bool open = false;  // an outermost field, whose value is being read
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
                        last = in.at;  // of what is no JSON the value may be nothing
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
