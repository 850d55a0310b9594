// Random payloads: those of engines, and damaged ones.
#pragma once

#include <random>

#include "index.hpp"

namespace kvrouter {

class RandomPayloads {
   public:
    explicit RandomPayloads(u64 seed) : random_(seed) {}

    u64 below(u64 end) { return random_() % end; }
    bool chance(u64 percent) { return below(100) < percent; }

    // Return a batch of a few events. Every third one is damaged.
    std::string batch() {
        Writer out;
        const u64 events = below(6);
        out.array(2 + below(2));
        out.integer(below(1000));
        out.array(events);
        for (u64 event = 0; event < events; ++event) write_event(out);
        if (out.bytes[0] == '\x93') chance(50) ? out.nil() : out.integer(below(8));
        if (chance(33)) damage(out.bytes);
        return std::move(out.bytes);
    }

    std::string event() {
        Writer out;
        write_event(out);
        if (chance(33)) damage(out.bytes);
        return std::move(out.bytes);
    }

    void damage(std::string& bytes) {
        for (u64 times = 1 + below(4); times > 0 && !bytes.empty(); --times) {
            const u64 at = below(bytes.size());
            switch (below(4)) {
                case 0: bytes[at] = static_cast<char>(below(256)); break;
                case 1: bytes.resize(at); break;
                case 2: bytes.insert(at, 1, static_cast<char>(0xc0 + below(32))); break;
                default: bytes.insert(at, bytes, at, below(16)); break;
            }
        }
    }

    std::string prompt(u64 tokens) {
        std::string packed;
        for (u64 token = 0; token < tokens; ++token) {
            const u32 id = static_cast<u32>(below(2));
            packed.append(reinterpret_cast<const char*>(&id), sizeof id);
        }
        return packed;
    }

   private:
    void write_event(Writer& out) {
        const u64 kind = below(20);
        if (kind == 0) return write_cleared(out);
        if (kind < 6) return write_removed(out);
        write_stored(out);
    }

    void write_cleared(Writer& out) {
        const bool medium = chance(50);
        if (chance(50)) {
            out.map(static_cast<u8>(1 + medium));
            out.text("type");
        } else {
            out.array(1 + medium);
            out.text("AllBlocksCleared");
            if (medium) write_medium(out);
            return;
        }
        out.text("AllBlocksCleared");
        if (!medium) return;
        out.text("medium");
        write_medium(out);
    }

    void write_removed(Writer& out) {
        out.map(4);
        out.text("type");
        out.text("BlockRemoved");
        out.text("block_hashes");
        write_names(out, below(4));
        out.text("medium");
        write_medium(out);
        out.text("group_idx");
        write_group(out);
    }

    void write_stored(Writer& out) {
        const u64 blocks = chance(2) ? below(1500) : below(5), block_size = 1 + below(3);
        const bool fits = chance(95), as_map = chance(70);
        if (as_map) {
            out.map(13);
            out.text("type");
        } else {
            out.array(12);
        }
        out.text("BlockStored");
        if (as_map) out.text("block_hashes");
        write_names(out, blocks);
        if (as_map) out.text("parent_block_hash");
        chance(40) ? out.nil() : write_name(out);
        if (as_map) out.text("token_ids");
        const u64 tokens = chance(5) ? 0 : blocks * block_size + !fits;
        out.array(tokens);
        for (u64 token = 0; token < tokens; ++token) out.integer(chance(1) ? random_() : below(2));
        if (as_map) out.text("block_size");
        out.integer(chance(95) ? block_size : below(u64{1} << below(64)));
        if (as_map) out.text("lora_id");
        chance(95) ? out.nil() : out.integer(below(3));
        if (as_map) out.text("medium");
        write_medium(out);
        if (as_map) out.text("lora_name");
        chance(95) ? out.nil() : out.text(chance(50) ? "sql" : "");
        if (as_map) out.text("extra_keys");
        write_keys(out, blocks);
        if (as_map) out.text("group_idx");
        write_group(out);
        if (as_map) out.text("kv_cache_spec_kind");
        static constexpr const char* kKinds[] = {"full_attention", "sliding_window", "mamba", "new"};
        chance(80) ? out.nil() : out.text(kKinds[below(4)]);
        if (as_map) out.text("kv_cache_spec_sliding_window");
        chance(70) ? out.nil() : out.integer(below(u64{1} << below(64)));
        if (as_map) {
            out.text("cache_salt");
            chance(95) ? out.nil() : out.text("salt");
        }
    }

    void write_keys(Writer& out, u64 blocks) {
        if (chance(85)) return out.nil();
        if (chance(5)) ++blocks;
        out.array(blocks);
        for (u64 block = 0; block < blocks; ++block) {
            if (chance(30)) {
                out.nil();
                continue;
            }
            const u64 keys = below(3);
            out.array(keys);
            for (u64 key = 0; key < keys; ++key) {
                if (chance(60)) {
                    out.text(chance(50) ? "sql" : "salt");
                } else if (chance(50)) {
                    out.integer(Integer{random_(), true});
                } else {
                    out.array(1);
                    out.text("\xc3\xa9");
                }
            }
        }
    }

    void write_names(Writer& out, u64 count) {
        out.array(count);
        if (count > 5) {
            for (u64 name = 0; name < count; ++name) out.integer(1000 + name);
        } else {
            for (u64 name = 0; name < count; ++name) write_name(out);
        }
    }

    void write_name(Writer& out) {
        const u64 name = below(30);
        if (name < 26) return out.integer(chance(10) ? 1000 + below(1500) : name);
        if (name < 28) return out.integer(Integer{~u64{0} - name, true});
        out.bytes += "\xc4\x02";
        out.bytes += static_cast<char>(name);
        out.bytes += 'x';
    }

    void write_medium(Writer& out) {
        static constexpr const char* kMedia[] = {"GPU", "CPU", "DISK", "CXL"};
        chance(70) ? out.nil() : out.text(kMedia[below(4)]);
    }

    void write_group(Writer& out) { chance(85) ? out.nil() : out.integer(below(3)); }

    std::mt19937_64 random_;
};

}  // namespace kvrouter
