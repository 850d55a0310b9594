// Sends batches, damaged batches and other messages to an inbox: `fuzz_inbox [messages] [seed]`.
//
// Build it with sanitizers. It checks that each message is received once and in order, that turns are limited, and that
// applying turns has the same results as applying single batches.
#include <cstdio>
#include <cstdlib>

#include "memory_sockets.hpp"

using namespace kvrouter;

namespace {

bool in_order(const std::vector<Frames>& messages) {
    for (std::size_t at = 0; at < messages.size(); ++at) {
        const auto seq = number_of(messages[at]);
        if (!seq) return false;
        if (at == 0) continue;
        const u64 before = *number_of(messages[at - 1]);
        if (before == ~u64{0} || *seq != before + 1) return false;
    }
    return true;
}

int fail(const char* why) { return std::puts(why), 1; }

// Compare a turn's messages with the sent ones. Return 0 if they are equal.
int check(const std::vector<Frames>& messages, const Received& turn, std::deque<Frames>& sent) {
    std::size_t bytes = 0, largest = 0;
    for (const Frames& frames : messages) {
        if (bytes >= Inbox::kBytesATurn) return fail("a turn is too long");
        if (sent.empty() || frames != sent.front()) return fail("a received message differs from the sent one");
        sent.pop_front();
        bytes += size_of(frames);
        largest = std::max(largest, size_of(frames));
    }
    if (bytes != turn.bytes || largest != turn.largest) return fail("a turn's sizes are wrong");
    if (turn.count > Inbox::kMessagesATurn) return fail("a turn has too many messages");
    return turn.in_order == in_order(messages) ? 0 : fail("a turn's `in_order` is wrong");
}

}  // namespace

int main(int count, char** arguments) {
    const u64 messages = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    RandomPayloads random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    constexpr u32 kSockets = 3;
    u64 done = 0, runs = 0, reported = 0;
    while (done < messages) {
        Inbox inbox(MemorySocket::functions());
        Index index("", 20, 3000), one_by_one("", 20, 3000);
        MemorySocket sockets[kSockets];
        std::deque<Frames> sent[kSockets];
        u64 seqs[kSockets] = {0, 7, ~u64{0} - 40};
        std::vector<void*> addresses;
        for (u32 number = 0; number < kSockets; ++number) {
            index.add("m", "t", std::nullopt, std::nullopt);
            one_by_one.add("m", "t", std::nullopt, std::nullopt);
            addresses.push_back(&sockets[number]);
        }
        for (int round = 0; round < 100; ++round) {
            for (u32 number = 0; number < kSockets; ++number)
                for (u64 more = random.below(random.chance(5) ? 200 : 8); more > 0; --more, ++done) {
                    sent[number].push_back(random_message(random, seqs[number]));
                    sockets[number].send(sent[number].back());
                }
            inbox.receive(addresses);
            std::vector<Inbox::Run> addressed;
            std::vector<std::vector<Frames>> batches;
            for (u32 number = 0; number < inbox.received().size(); ++number) {
                const Received& turn = inbox.received()[number];
                std::vector<Frames> got = received_of(inbox, turn);
                if (check(got, turn, sent[number])) return 1;
                if (turn.drained && !sockets[number].is_empty()) return fail("`drained` is true, but messages are left");
                if (!turn.in_order || random.chance(10)) continue;
                addressed.push_back({number, index.holdings(number)});
                batches.push_back(std::move(got));
            }
            runs += addressed.size();
            std::vector<std::pair<u32, u64>> found, expected;
            inbox.address(addressed);
            for (Applied last; const auto origin = inbox.apply(index, last); ++reported)
                found.emplace_back(origin->place, inbox.seq(origin->message));
            for (std::size_t run = 0; run < addressed.size(); ++run) {
                const u32 place = static_cast<u32>(addressed[run].place);
                for (const Frames& frames : batches[run])
                    if (one_by_one.apply(place, frames[2], nullptr, false).tells())
                        expected.emplace_back(place, *number_of(frames));
            }
            if (found != expected) return fail("the reported batches differ");
        }
        for (u32 number = 0; number < kSockets; ++number)
            if (index.dump(number) != one_by_one.dump(number)) return fail("the applied batches differ");
        MemorySocket breaking;
        breaking.break_off();
        breaking.send({"half", "a message"});
        inbox.receive({&breaking});
        if (inbox.received()[0].count != 0 || !inbox.received()[0].drained) return fail("an incomplete message was received");
    }
    std::printf("%llu messages: %llu runs, %llu batches reported\n", static_cast<unsigned long long>(done),
                static_cast<unsigned long long>(runs), static_cast<unsigned long long>(reported));
}
