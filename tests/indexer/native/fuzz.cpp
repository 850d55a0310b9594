// Applies random and damaged payloads to the native core, and calls its other operations: `fuzz [payloads] [seed]`.
//
// Build it with sanitizers. It also checks the tree's invariants, and that all memory is freed at the end.
#include <cstdio>
#include <cstdlib>

#include "random_payloads.hpp"

using namespace kvrouter;

int main(int count, char** arguments) {
    const u64 payloads = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    const u64 seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    RandomPayloads random(seed);
    constexpr u32 kTargets = 3;
    u64 applied = 0, rejected = 0, foreign = 0, matched = 0;
    for (u64 done = 0; done < payloads;) {
        Index index("", 20, 3000);
        for (u32 target = 0; target < kTargets; ++target)
            index.add("m", "t", target == 1 ? std::optional<std::string>("sql") : std::nullopt,
                      target == 0 ? std::optional<u64>(8) : std::nullopt);
        for (u64 life = 0; life < 500 && done < payloads; ++life, ++done) {
            const u32 target = static_cast<u32>(random.below(kTargets));
            const std::string payload = random.batch();
            Applied outcome = index.apply(target, payload, nullptr, random.chance(5));
            applied += outcome.is_batch;
            rejected += outcome.rejected.size();
            foreign += outcome.foreign.size();
            if (!outcome.foreign.empty()) {
                std::vector<std::pair<u32, std::string>> known;
                for (const auto& [at, bytes] : outcome.foreign)
                    known.emplace_back(at, random.chance(50) ? random.event() : std::string(bytes));
                index.apply(target, payload, &known, false);
            }
            const std::string prompt = random.prompt(random.below(12));
            const u64 block_size = 1 + random.below(3);
            PromptHashes hashes(namespace_hash("", "m", "t", std::nullopt, std::nullopt, block_size), block_size, prompt, {});
            for (const Match& match : index.match(hashes, prompt.size() / 4 / block_size)) {
                u32 tiers = 0;
                for (const u32 blocks : match.tiers) tiers += blocks;
                if (tiers != match.blocks) return std::puts("the sum of the tiers differs from the matched blocks"), 1;
                matched += match.blocks;
            }
            if (random.chance(1)) {
                std::string dump = index.dump(target);
                const bool damaged = random.chance(50);
                if (damaged) random.damage(dump);
                index.drop(target);
                if (index.add("m", "t", std::nullopt, std::nullopt) != target) return std::puts("a dropped target's number was not reused"), 1;
                if (!index.restore(target, dump, {1, 2}) && !damaged) return std::puts("a valid dump was rejected"), 1;
                if (!index.is_sound()) return std::puts("an invariant of the tree is violated"), 1;
            }
            if (random.chance(1)) index.clear(target);
        }
        if (!index.is_sound()) return std::puts("an invariant of the tree is violated"), 1;
        for (u32 target = 0; target < kTargets; ++target) index.drop(target);
        for (int times = 0; times < 100; ++times) index.sweep();
        if (index.runs() != 0) return std::puts("runs were not freed"), 1;
    }
    std::printf("%llu payloads: %llu batches, %llu events rejected, %llu foreign, %llu blocks matched\n",
                static_cast<unsigned long long>(payloads), static_cast<unsigned long long>(applied),
                static_cast<unsigned long long>(rejected), static_cast<unsigned long long>(foreign),
                static_cast<unsigned long long>(matched));
    return matched > 0 ? 0 : 1;
}
