// Runs the checks of JSON bodies on random and damaged bodies: `fuzz_json [bodies] [seed]`. Build it with sanitizers.
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>

#include "json_outline.hpp"

using namespace kvrouter;

namespace {

class RandomJson {
public:
    explicit RandomJson(u64 seed) : random_(seed) {}

    u64 below(u64 bound) { return std::uniform_int_distribution<u64>(0, bound - 1)(random_); }

    std::string body() {
        std::string made;
        value(made, 0);
        for (u64 damage = below(4) == 0 ? 1 + below(3) : 0; damage > 0; --damage) {
            const std::size_t place = below(made.size());
            const char byte = static_cast<char>(below(256));
            switch (below(3)) {
                case 0: made.insert(place, 1, byte); break;
                case 1: made[place] = byte; break;
                default: made.resize(place + 1);
            }
        }
        return made;
    }

private:
    void value(std::string& made, int depth) {
        const u64 kind = depth > 5 ? below(3) : depth == 0 ? 4 : below(6);
        space(made);
        if (kind == 0) {
            made += kWords[below(std::size(kWords))];
        } else if (kind < 3) {
            string(made);
        } else if (kind == 3) {
            made += '[';
            for (u64 left = below(4); left > 0; --left) value(made, depth + 1), made += left > 1 ? "," : "";
            made += ']';
        } else {
            made += '{';
            for (u64 left = below(5); left > 0; --left) {
                string(made);
                space(made);
                made += ':';
                value(made, depth + 1);
                made += left > 1 ? "," : "";
            }
            made += '}';
        }
        space(made);
    }

    void string(std::string& made) {
        made += '"';
        for (u64 left = below(6); left > 0; --left) made += kTexts[below(std::size(kTexts))];
        made += '"';
    }

    void space(std::string& made) {
        while (below(4) == 0) made += " \t\r\n"[below(4)];
    }

    static constexpr const char* kWords[] = {"1", "-0", "true", "null", "1e9", "0.1234567890123456789", "99999999999999999999"};
    static constexpr const char* kTexts[] = {"model", "rid", "\\u0072id", "\\ud83d\\ude00", "\\ud800", "\xC3\xA9", "\xF0\x9F\x98\x80",
                                             "\xED\xA0\x80", "\xFF", "\\\"", "[{,:", "some longer text of more than eight bytes"};
    std::mt19937_64 random_;
};

}  // namespace

int main(int count, char** arguments) {
    const u64 bodies = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    RandomJson random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    const JsonCheck check({"rid", "priority"}, {"model"}, 2, 50, 100);
    u64 plain = 0, outlined = 0;
    for (u64 done = 0; done < bodies; ++done) {
        std::string body = random.body();
        body.shrink_to_fit();  // so that sanitizers detect a read beyond its end
        const bool is_plain = check.named(body).has_value();
        plain += is_plain;
        JsonOutline outline;
        const bool read = outline.read(body, random.below(4) == 0 ? random.below(30) : 1'000'000);
        if (is_plain && !read) return std::puts("a plain body has no outline"), 1;
        if (!read) continue;
        ++outlined;
        if (outline.text.size() > body.size()) return std::puts("an outline is longer than its body"), 1;
        std::size_t last = 0;
        for (const JsonField& each : outline.fields) {
            if (each.value_end == 0) break;  // the outline was cut off in this field
            if (!(last <= each.name && each.name < each.name_end && each.name_end < each.value && each.value <= each.value_end &&
                  each.value_end <= body.size()))
                return std::puts("a field's positions are invalid"), 1;
            last = each.value_end;
        }
    }
    std::printf("%llu bodies: %llu plain, %llu outlined\n", static_cast<unsigned long long>(bodies),
                static_cast<unsigned long long>(plain), static_cast<unsigned long long>(outlined));
    return plain > 0 && outlined > 0 ? 0 : 1;
}
