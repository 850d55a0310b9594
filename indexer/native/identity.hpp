// Identity of blocks beyond their tokens: adapter, cache salt, and keys of single blocks (kvevents/events.py).
#pragma once

#include <optional>
#include <set>
#include <string>

#include "events.hpp"

namespace kvrouter {

// An event that is readable but invalid.
struct UnusableEvent {
    std::string reason;
};

struct Identity {
    std::optional<std::string> adapter, salt;
    std::vector<std::optional<std::string>> keys;  // encoded, one per block; empty if no block has keys
};

using Adapters = std::set<std::string, std::less<>>;

inline std::optional<std::string> optional_text(std::string_view text) {
    return text.data() == nullptr ? std::nullopt : std::optional<std::string>(text);
}

// Return the text of an encoded value.
inline std::optional<std::string> text_of(std::string_view encoded) {
    std::string_view text;
    return Reader(encoded).read_text(text) ? std::optional<std::string>(text) : std::nullopt;
}

inline void remove_first(std::vector<std::string_view>& keys, const std::string& encoded) {
    for (auto key = keys.begin(); key != keys.end(); ++key) {
        if (*key != encoded) continue;
        keys.erase(key);
        return;
    }
}

inline std::string encoded_text(std::string_view text) {
    Writer out;
    out.text(text);
    return out.bytes;
}

inline std::optional<std::string> adapter_in_keys(
    const Event& event, const std::vector<std::vector<std::string_view>>& keys_by_block, const Adapters& adapters) {
    const auto& first = keys_by_block.front();
    const auto name = first.empty() ? std::nullopt : text_of(first.front());
    bool in_all = name.has_value();
    for (const auto& keys : keys_by_block) in_all = in_all && !keys.empty() && keys.front() == first.front();
    const bool starts_with_several = !event.has_parent && keys_by_block.size() > 1;
    if (in_all && (event.has_lora_id || adapters.contains(*name) || starts_with_several)) return name;
    if (!event.has_lora_id) return std::nullopt;
    return "lora_id:" + event.lora_id.text();
}

inline Identity identity_of(const Event& event, const Batch& batch, const Adapters& adapters) {
    Identity identity{optional_text(event.lora_name), optional_text(event.cache_salt), {}};
    if (event.keys.count == 0) {
        if (!identity.adapter && event.has_lora_id) identity.adapter = "lora_id:" + event.lora_id.text();
        return identity;
    }
    if (event.keys.count != event.names.count)
        throw UnusableEvent{"extra_keys has " + std::to_string(event.keys.count) + " entries for " +
                            std::to_string(event.names.count) + " blocks"};
    std::vector<std::vector<std::string_view>> rest(event.keys.count);
    for (u32 block = 0; block < event.keys.count; ++block) {
        const Range parts = batch.keys[event.keys.first + block];
        const auto first = batch.key_parts.begin() + parts.first;
        rest[block].assign(first, first + parts.count);
    }
    if (!identity.adapter) identity.adapter = adapter_in_keys(event, rest, adapters);
    if (identity.adapter)
        for (auto& keys : rest) remove_first(keys, encoded_text(*identity.adapter));
    if (!identity.salt && !event.has_parent) {
        for (auto key = rest[0].rbegin(); key != rest[0].rend() && !identity.salt; ++key) identity.salt = text_of(*key);
        if (identity.salt) remove_first(rest[0], encoded_text(*identity.salt));
    }
    bool any = false;
    for (const auto& keys : rest) any |= !keys.empty();
    if (!any) return identity;
    for (const auto& keys : rest) {
        identity.keys.emplace_back();
        if (keys.empty()) continue;
        Writer out;
        out.array(keys.size());
        for (const auto key : keys) out.bytes += key;
        identity.keys.back() = std::move(out.bytes);
    }
    return identity;
}

// Return the root of a namespace's prefix hashes (indexer/hashing.py).
inline u64 namespace_hash(
    std::string_view secret, std::string_view model, std::string_view tenant, const std::optional<std::string>& adapter,
    const std::optional<std::string>& salt, u64 block_size) {
    Writer out;
    out.array(6);
    out.text(secret);
    out.text(model);
    out.text(tenant);
    adapter ? out.text(*adapter) : out.nil();
    salt ? out.text(*salt) : out.nil();
    out.integer(block_size);
    return xxh3::hash(out.bytes.data(), out.bytes.size(), 0);
}

}  // namespace kvrouter
