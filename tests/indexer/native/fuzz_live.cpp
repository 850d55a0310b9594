// Reads live sockets while other threads send and match: `fuzz_live [messages] [seed]`.
//
// Build it with AddressSanitizer and with ThreadSanitizer. It checks that each message of a socket arrives once and in
// order: expected batches are applied and reported, other messages are received. The results equal those of a second
// index, the twin, to which the same batches are applied one by one.
#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "live_reader.hpp"
#include "memory_sockets.hpp"

using namespace kvrouter;

namespace {

constexpr u32 kSockets = 3;
constexpr std::size_t kLargest = 20'000;

[[noreturn]] void fail(const char* why) {
    std::puts(why);
    std::exit(1);
}

class Stream {
   public:
    Stream(u32 number, u64 first) : number(number), seq_(first) {}

    // Send a random message. Called by the sending thread.
    void send(RandomPayloads& random) {
        Frames message = random_message(random, seq_);
        {
            const std::lock_guard guard(lock_);
            sent_.push_back(message);
        }
        socket.send(std::move(message));
    }

    // Remove and return the first sent message that was not checked yet.
    Frames next() {
        const std::lock_guard guard(lock_);
        if (sent_.empty()) fail("more messages arrived than were sent");
        Frames message = std::move(sent_.front());
        sent_.pop_front();
        return message;
    }

    bool is_done() {
        const std::lock_guard guard(lock_);
        return sent_.empty();
    }

    const u32 number;
    MemorySocket socket;
    std::vector<u64> expected, reported;  // sequence numbers that must be reported, and that were reported

   private:
    std::mutex lock_;
    std::deque<Frames> sent_;
    u64 seq_;
};

bool all_received(std::deque<Stream>& streams) {
    return std::ranges::all_of(streams, [](Stream& stream) { return stream.socket.is_empty(); });
}

// Caller of a reader. It applies the batches that the reader reports as applied to the twin, one by one.
class Caller {
   public:
    Caller(Index& index, Index& twin, std::deque<Stream>& streams, RandomPayloads& random)
        : index_(index), twin_(twin), streams_(streams), random_(random), reader_(MemorySocket::functions(), index, others_.fd()) {
        for (Stream& stream : streams_) follow(stream);
    }

    void read() {
        const bool waits = !all_received(streams_);
        const auto left = reader_.read(random_.chance(20) ? 0 : 0.02);
        if (waits && left == LiveReader::Left::kNothing && reader_.applied().empty() && !reader_.has_unreported())
            fail("sent messages do not arrive");
        take();
        if (left == LiveReader::Left::kToReport) tell(reader_.round());
        if (left == LiveReader::Left::kReceived) receive();
        if (random_.chance(2)) follow_again(streams_[random_.below(kSockets)]);
        if (random_.chance(2)) others_.send({"something else"});
        if (Frame frame(zmq_); random_.chance(50)) frame.receive(&others_);
    }

    u64 applied() const { return applied_; }

   private:
    void follow(Stream& stream) {
        reader_.follow(stream.socket.fd(), &stream.socket);
        if (random_.chance(80)) reader_.expect(stream.socket.fd(), stream.number, random_.below(10), kLargest);
    }

    void follow_again(Stream& stream) {
        reader_.rest();
        take();
        reader_.leave(stream.socket.fd());
        follow(stream);
    }

    Stream& stream_of(int fd) {
        for (Stream& stream : streams_)
            if (stream.socket.fd() == fd) return stream;
        fail("unknown socket");
    }

    // Check the batches that the reader reports as applied.
    void take() {
        for (const AppliedRun& each : reader_.applied()) {
            Stream& stream = stream_of(each.fd);
            std::size_t bytes = 0;
            Frames message;
            for (u64 seq = each.first;; ++seq, ++applied_) {
                message = stream.next();
                if (number_of(message) != seq) fail("the applied batch differs from the sent one");
                if (size_of(message) > kLargest) fail("a batch above the limit was applied");
                bytes += size_of(message);
                apply_to_twin(stream, message);
                if (seq == each.last) break;
            }
            if (bytes != each.bytes) fail("the reported bytes are wrong");
            if (each.payload->bytes() != message[2]) fail("the last payload differs");
        }
    }

    void apply_to_twin(Stream& stream, const Frames& message) {
        if (twin_.apply(stream.number, message[2], nullptr, false).tells()) stream.expected.push_back(*number_of(message));
    }

    void tell(const std::vector<int>& round) {
        for (Applied last; const auto origin = reader_.apply(last);)
            stream_of(round[origin->place]).reported.push_back(reader_.inbox().seq(origin->message));
    }

    // Check the messages that the reader left, and apply most of those that are in order.
    void receive() {
        const std::vector<int> round = reader_.round();
        std::vector<std::pair<std::size_t, u32>> runs;
        for (std::size_t place = 0; place < round.size(); ++place) {
            const Received& turn = reader_.inbox().received()[place];
            Stream& stream = stream_of(round[place]);
            const auto messages = received_of(reader_.inbox(), turn);
            for (const Frames& message : messages)
                if (stream.next() != message) fail("a received message differs from the sent one");
            if (messages.empty()) continue;
            const auto last = number_of(messages.back());
            if (last && *last != ~u64{0} && random_.chance(90)) {
                reader_.expect(stream.socket.fd(), stream.number, *last + 1, kLargest);
            } else {
                reader_.expect_nothing(stream.socket.fd());
            }
            if (!turn.in_order || random_.chance(10)) continue;
            runs.emplace_back(place, stream.number);
            for (const Frames& message : messages) apply_to_twin(stream, message);
        }
        reader_.address(runs);
        tell(round);
    }

    Index& index_;
    Index& twin_;
    std::deque<Stream>& streams_;
    RandomPayloads& random_;
    MemorySocket others_;
    const Zmq zmq_ = MemorySocket::functions();
    LiveReader reader_;
    u64 applied_ = 0;
};

// Return the matched blocks of a prompt by target and tier. Dumps are not compared, because they depend on the order of
// arrival.
std::map<u32, std::vector<u32>> held_of(Index& index, const std::string& prompt) {
    PromptHashes hashes(namespace_hash("", "m", "t", std::nullopt, std::nullopt, 2), 2, prompt, {});
    std::map<u32, std::vector<u32>> held;
    for (const Match& match : index.match(hashes, 6)) held[match.target].assign(match.tiers, match.tiers + kTiers);
    return held;
}

}  // namespace

int main(int count, char** arguments) {
    const u64 messages = count > 1 ? std::strtoull(arguments[1], nullptr, 10) : 100'000;
    const u64 seed = count > 2 ? std::strtoull(arguments[2], nullptr, 10) : 1;
    RandomPayloads random(seed);
    u64 done = 0, taken = 0, reported = 0;
    while (done < messages) {
        Index index("", 20, 3000), twin("", 20, 3000);
        std::deque<Stream> streams;
        for (u32 number = 0; number < kSockets; ++number) {
            index.add("m", "t", std::nullopt, std::nullopt);
            twin.add("m", "t", std::nullopt, std::nullopt);
            streams.emplace_back(number, number == 0 ? ~u64{0} - 40 : number);
        }
        std::atomic<bool> all_sent = false, all_read = false;
        const u64 own_seed = seed + done;
        std::thread sender([&] {
            RandomPayloads own(own_seed);
            for (int round = 0; round < 100; ++round) {
                for (Stream& stream : streams)
                    for (u64 more = own.below(own.chance(5) ? 200 : 8); more > 0; --more, ++done) stream.send(own);
                if (own.chance(10)) std::this_thread::sleep_for(std::chrono::milliseconds(own.below(8)));
                for (const bool waits = own.chance(70); waits && !all_received(streams);) std::this_thread::yield();
            }
            all_sent = true;
        });
        std::thread matcher([&] {
            RandomPayloads own(own_seed + 1);
            while (!all_read) {
                const std::string prompt = own.prompt(12);
                held_of(index, prompt);
                index.status(static_cast<u32>(own.below(kSockets)));
            }
        });
        Caller caller(index, twin, streams, random);
        while (!all_sent || !std::ranges::all_of(streams, &Stream::is_done)) caller.read();
        all_read = true;
        sender.join();
        matcher.join();
        for (Stream& stream : streams) {
            if (stream.reported != stream.expected) fail("the reported batches differ");
            if (index.status(stream.number) != twin.status(stream.number)) fail("the applied batches differ");
            reported += stream.reported.size();
        }
        for (int times = 0; times < 200; ++times)
            if (const auto prompt = random.prompt(12); held_of(index, prompt) != held_of(twin, prompt))
                fail("the matched blocks differ");
        taken += caller.applied();
    }
    std::printf("%llu messages: %llu applied by the reader, %llu batches reported\n", static_cast<unsigned long long>(done),
                static_cast<unsigned long long>(taken), static_cast<unsigned long long>(reported));
}
