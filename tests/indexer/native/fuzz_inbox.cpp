// An inbox among sockets that bring batches, damaged ones and messages that are none: `fuzz_inbox [messages] [seed]`.
//
// To be built with sanitizers. Every message comes once and in order, bounded turn by turn, and what is applied by runs
// is what is applied batch by batch.
#include <cstdio>
#include <cstdlib>
#include <deque>

#include "inbox.hpp"
#include "random_payloads.hpp"

using namespace kvrouter;

namespace {

using Frames = std::vector<std::string>;

struct Socket {
    std::deque<Frames> messages;
    std::size_t frame = 0;  // of the first one, the next
    bool interrupts = false, breaks_off = false;
};

// What a zmq_msg_t has in it.
struct Content {
    std::string bytes;
    bool more;
};

Content*& content(void* message) { return *static_cast<Content**>(message); }

int init(void* message) {
    content(message) = nullptr;
    return 0;
}

int close(void* message) {
    delete content(message);
    return init(message);
}

int copy(void* to, void* from) {
    close(to);
    if (content(from) != nullptr) content(to) = new Content(*content(from));
    return 0;
}

int receive(void* message, void* from, int) {
    Socket& socket = *static_cast<Socket*>(from);
    socket.interrupts = !socket.interrupts;
    errno = socket.interrupts ? EINTR : EAGAIN;
    if (socket.interrupts || socket.messages.empty()) return -1;
    Frames& frames = socket.messages.front();
    if (socket.breaks_off && socket.frame > 0) {
        socket.messages.clear();
        return -1;
    }
    close(message);
    content(message) = new Content{frames[socket.frame], socket.frame + 1 < frames.size()};
    if (++socket.frame == frames.size()) {
        socket.messages.pop_front();
        socket.frame = 0;
    }
    return 0;
}

void* data(void* message) { return content(message)->bytes.data(); }
std::size_t size(const void* message) { return content(const_cast<void*>(message))->bytes.size(); }
int more(const void* message) { return content(const_cast<void*>(message))->more; }

std::string big_endian(u64 number) {
    std::string bytes;
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
    return bytes;
}

Frames message(RandomPayloads& random, u64& seq) {
    Frames frames{"topic", big_endian(seq++), random.chance(2) ? std::string(random.below(100'000), 'x') : random.batch()};
    if (random.chance(2)) frames.resize(1 + random.below(6));
    if (random.chance(2)) random.damage(frames.back());
    if (random.chance(2)) frames[0].resize(random.below(9));
    if (random.chance(1) && frames.size() > 1) frames[1].resize(random.below(9));
    if (random.chance(2)) seq += random.below(3) - 1;
    return frames;
}

std::optional<u64> number(const Frames& frames) {
    if (frames.size() != 3 || frames[1].size() != 8) return std::nullopt;
    u64 seq = 0;
    for (const char byte : frames[1]) seq = seq << 8 | static_cast<u8>(byte);
    return seq;
}

bool in_order(const std::vector<Frames>& messages) {
    for (std::size_t at = 0; at < messages.size(); ++at) {
        const auto seq = number(messages[at]);
        if (!seq) return false;
        if (at > 0 && (*number(messages[at - 1]) == ~u64{0} || *seq != *number(messages[at - 1]) + 1)) return false;
    }
    return true;
}

int fail(const char* why) { return std::puts(why), 1; }

// What a turn had, which is checked against what was sent.
int check(const Inbox& inbox, const Received& turn, std::deque<Frames>& sent, std::vector<Frames>& messages) {
    std::size_t bytes = 0, largest = 0;
    for (std::size_t at = turn.first; at < turn.first + turn.count; ++at) {
        if (bytes >= Inbox::kBytesATurn) return fail("a turn is too long");
        Frames frames;
        inbox.each_frame(at, [&](std::string_view frame) { frames.emplace_back(frame); });
        if (sent.empty() || frames != sent.front()) return fail("another message was sent");
        sent.pop_front();
        std::size_t size = 0;
        for (const auto& frame : frames) size += frame.size();
        bytes += size;
        largest = std::max(largest, size);
        messages.push_back(std::move(frames));
    }
    if (bytes != turn.bytes || largest != turn.largest) return fail("sizes are wrong");
    if (turn.count > Inbox::kMessagesATurn) return fail("a turn has too many messages");
    return turn.in_order == in_order(messages) ? 0 : fail("what is in order is not known");
}

}  // namespace

int main(int count, char** arguments) {
    const u64 messages = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    RandomPayloads random(count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1);
    constexpr u32 kSockets = 3;
    u64 done = 0, runs = 0, told = 0;
    while (done < messages) {
        Inbox inbox({init, receive, data, size, more, copy, close});
        Index index("", 20, 3000), one_by_one("", 20, 3000);
        Socket sockets[kSockets];
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
                    sockets[number].messages.push_back(message(random, seqs[number]));
                    sent[number].push_back(sockets[number].messages.back());
                }
            inbox.receive(addresses);
            std::vector<Inbox::Run> addressed;
            std::vector<std::vector<Frames>> batches;
            for (u32 number = 0; number < inbox.received().size(); ++number) {
                const Received& turn = inbox.received()[number];
                std::vector<Frames> got;
                if (check(inbox, turn, sent[number], got)) return 1;
                if (turn.drained && !sockets[number].messages.empty()) return fail("not drained");
                if (!turn.in_order || random.chance(10)) continue;
                addressed.push_back({number, index.holdings(number)});
                batches.push_back(std::move(got));
            }
            runs += addressed.size();
            std::vector<std::pair<u32, u64>> found, expected;
            inbox.address(addressed);
            for (Applied last; const auto origin = inbox.apply(index, last); ++told)
                found.emplace_back(origin->place, inbox.seq(origin->message));
            for (std::size_t run = 0; run < addressed.size(); ++run) {
                const u32 place = static_cast<u32>(addressed[run].place);
                for (const Frames& frames : batches[run])
                    if (one_by_one.apply(place, frames[2], nullptr, false).tells()) expected.emplace_back(place, *number(frames));
            }
            if (found != expected) return fail("something else was told");
        }
        for (u32 number = 0; number < kSockets; ++number)
            if (index.dump(number) != one_by_one.dump(number)) return fail("something else was applied");
        sockets[0].messages.assign(1, {"half", "a message"});
        sockets[0].breaks_off = true;
        inbox.receive({&sockets[0]});
        if (inbox.received()[0].count != 0 || !inbox.received()[0].drained) return fail("half a message is none");
    }
    std::printf("%llu messages: %llu runs, %llu batches told of\n", static_cast<unsigned long long>(done),
                static_cast<unsigned long long>(runs), static_cast<unsigned long long>(told));
}
