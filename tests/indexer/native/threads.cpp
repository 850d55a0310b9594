// Threads that apply, match, dump, clear, drop and read states at once: `threads [rounds]`. Needs ThreadSanitizer.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "random_payloads.hpp"

using namespace kvrouter;

int main(int count, char** arguments) {
    const u64 rounds = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 2'000;
    Index index("", 100, 3000);
    constexpr u32 kTargets = 4;
    for (u32 target = 0; target < kTargets; ++target) index.add("m", "t", std::nullopt, std::nullopt);
    std::vector<std::thread> threads;
    std::atomic<u64> matched = 0;
    for (u64 reader = 0; reader < 2; ++reader)
        threads.emplace_back([&, reader] {
            RandomPayloads random(reader);
            for (u64 round = 0; round < rounds; ++round)
                index.apply(static_cast<u32>(random.below(kTargets)), random.batch(), nullptr, false);
        });
    threads.emplace_back([&] {  // applies several batches at once, whose targets may be dropped meanwhile
        RandomPayloads random(50);
        for (u64 round = 0; round < rounds / 4; ++round) {
            std::vector<std::string> payloads;
            for (u32 count = 0; count < 4; ++count) payloads.push_back(random.batch());
            std::vector<Index::Addressed> batches;
            for (const auto& each : payloads) batches.push_back({index.holdings(static_cast<u32>(random.below(kTargets))), each});
            Applied last;
            while (!batches.empty()) {
                const auto done = index.apply_all(batches, last);
                batches.erase(batches.begin(), batches.begin() + static_cast<std::ptrdiff_t>(done));
            }
        }
    });
    for (u64 router = 0; router < 2; ++router)
        threads.emplace_back([&, router] {
            RandomPayloads random(100 + router);
            for (u64 round = 0; round < rounds; ++round) {
                const std::string prompt = random.prompt(12);
                PromptHashes hashes(namespace_hash("", "m", "t", std::nullopt, std::nullopt, 2), 2, prompt, {});
                matched += index.match(hashes, 6).size();
                index.status(static_cast<u32>(random.below(kTargets)));
            }
        });
    threads.emplace_back([&] {
        RandomPayloads random(200);
        for (u64 round = 0; round < rounds / 20; ++round) {
            const u32 target = static_cast<u32>(random.below(kTargets));
            const std::string dump = index.dump(target);
            random.chance(50) ? index.clear(target) : index.drop(target);
            const u32 added = index.add("m", "t", std::nullopt, std::nullopt);
            index.restore(added, dump, {1, 2});
            if (added >= kTargets) index.drop(added);
            index.sweep();
        }
    });
    for (auto& thread : threads) thread.join();
    std::printf("%llu matches\n", static_cast<unsigned long long>(matched.load()));
    return index.is_sound() ? 0 : 1;
}
