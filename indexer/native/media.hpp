// Media of blocks in events (kvevents/events.py).
#pragma once

#include <algorithm>
#include <array>
#include <string_view>

namespace kvrouter {

enum Tier : unsigned char { kGpu, kCpu, kDisk, kUnknownTier, kTiers };

struct Medium {
    std::string_view name;
    Tier tier;
    bool pooled;      // other workers can load from it too
    bool identified;  // its events carry the whole identity of a block
};

inline constexpr std::array<Medium, 12> kMedia{{
    {"GPU", kGpu, false, true},
    {"CPU", kCpu, false, false},
    {"CPU_PINNED", kCpu, false, true},
    {"STORAGE", kDisk, false, false},
    {"DISK", kDisk, false, true},
    {"FS", kDisk, false, false},
    {"EXTERNAL", kUnknownTier, true, false},
    {"SHARED_STORAGE", kUnknownTier, true, false},
    {"OBJ", kUnknownTier, true, false},
    {"OBJECT_STORE", kUnknownTier, true, false},
    {"cpu", kUnknownTier, true, false},
    {"disk", kUnknownTier, true, false},
}};

inline const Medium* medium_named(std::string_view name) {
    for (const Medium& medium : kMedia)
        if (medium.name == name) return &medium;
    return nullptr;
}

// Return the usual spelling of a medium; the name itself if it is unknown, or a pool's name in lower case.
inline std::string_view canonical_medium(std::string_view name) {
    if (name.data() == nullptr || medium_named(name) != nullptr) return name;
    const auto upper = [](char letter) { return letter >= 'a' && letter <= 'z' ? static_cast<char>(letter - 32) : letter; };
    for (const Medium& medium : kMedia)
        if (std::ranges::equal(medium.name, name, {}, {}, upper)) return medium.name;
    return name;
}

inline Tier tier_of(std::string_view medium) {
    const Medium* known = medium_named(medium);
    return known == nullptr ? kUnknownTier : known->tier;
}

}  // namespace kvrouter
