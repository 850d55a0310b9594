// Reads the live sockets in rounds. Expected batches are applied to the index; anything else is left to the caller.
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <unordered_map>
#include <utility>

#include "inbox.hpp"
#include "poller.hpp"
#include "reading_threads.hpp"

namespace kvrouter {

// Batches with consecutive sequence numbers that were received from one socket and applied.
struct AppliedRun {
    int fd;
    u64 first, last;  // sequence numbers
    std::unique_ptr<Frame> payload;  // of the last batch
    std::chrono::steady_clock::time_point since;  // when the first batch was received
    std::size_t bytes = 0;  // of all batches
    double received_at = 0;  // when the last batch was received (Unix time in seconds)
};

// A reader of all live sockets. Not safe for use by several threads.
class LiveReader {
   public:
    // `others`: a file descriptor that becomes readable when the caller has other work.
    LiveReader(const Zmq& zmq, Index& index, int others) : zmq_(zmq), index_(index), inbox_(zmq_), others_(others) {
        poller_.add(others);
    }

    // Begin to read a socket, which is found by the file descriptor that signals its messages.
    void follow(int fd, void* socket) {
        poller_.add(fd);
        live_[fd].socket = socket;
        look_again(fd);  // its descriptor may have signalled before it was polled
    }

    // Stop reading a socket.
    void leave(int fd) {
        poller_.remove(fd);
        live_.erase(fd);
        std::erase(ready_, fd);
        std::erase(unreported_, fd);
    }

    // Read a socket in the next round even if its file descriptor does not signal: libzmq signals an arrival only once.
    void look_again(int fd) {
        Live& live = live_.at(fd);
        if (!live.is_ready) ready_.push_back(fd);
        live.is_ready = true;
    }

    // Apply a socket's batches from sequence number `seq` on to a target, until one has more than `largest` bytes.
    void expect(int fd, u32 number, u64 seq, std::size_t largest) {
        Live& live = live_.at(fd);
        live.holdings = index_.holdings(number);
        live.next = seq;
        live.largest = largest;
    }

    // Leave all of a socket's messages to the caller.
    void expect_nothing(int fd) { live_.at(fd).holdings = nullptr; }

    // The part of the last round that the caller must handle.
    enum class Left {
        kNothing,
        kToReport,  // an applied batch that must be reported, and the batches after it, which are not applied yet
        kReceived,  // all messages; nothing of the round was applied
    };

    // Wait at most `seconds` for messages, and read rounds while they hold expected batches only. Reading ends at a
    // pause in the traffic or, under heavy traffic, after `seconds`. Return the part of the last round that is left.
    Left read(double seconds) {
        const bool had_many = std::exchange(batches_, 0) >= kMany;
        reading_threads_.begin(had_many);
        const Left left = read_rounds(seconds, had_many);
        reading_threads_.end();
        return left;
    }

    // Return whether batches were applied that the last `read` did not report in `applied`.
    bool has_unreported() const { return !unreported_.empty(); }

    // Report in `applied` all applied batches that were not reported yet.
    void rest() {
        reported_.clear();
        report(Left::kNothing);
    }

    // The applied batches that the last `read` or `rest` reports, by socket.
    const std::vector<AppliedRun>& applied() const { return reported_; }

    // The file descriptors of the sockets that had a turn in the last round, in order.
    const std::vector<int>& round() const { return round_; }

    const Inbox& inbox() const { return inbox_; }

    // Choose turns of the last round (by place) and the targets to which `apply` will apply them.
    void address(const std::vector<std::pair<std::size_t, u32>>& runs) {
        std::vector<Inbox::Run> addressed;
        for (const auto& [place, number] : runs) addressed.push_back({place, index_.holdings(number)});
        inbox_.address(addressed);
    }

    // Apply the next batches, as `Inbox::apply` does, starting with the outcome that `read` left to report.
    std::optional<Inbox::Origin> apply(Applied& last) {
        if (!origin_) return inbox_.apply(index_, last);
        last = std::move(applied_);
        return std::exchange(origin_, std::nullopt);
    }

   private:
    using Clock = std::chrono::steady_clock;
    // Minimum time between rounds. Streams send at different times, and each wake-up for a single batch interrupts
    // another thread.
    static constexpr std::chrono::milliseconds kRound{1}, kLongRound{4};
    // Applied batches are reported once nothing has arrived for this time: a report needs Python's lock, which a query
    // for the same blocks needs too.
    static constexpr std::chrono::milliseconds kPause{5};
    // From this number of batches in quick succession on, traffic is heavy: rounds are long, and no pause is awaited.
    static constexpr std::size_t kMany = 32;
    // Under heavy traffic, the minimum time between two reports of one stream.
    static constexpr std::chrono::milliseconds kUnreported{500};
    static constexpr Clock::time_point kAll = Clock::time_point::max();

    struct Live {
        void* socket = nullptr;
        bool is_ready = false;
        std::shared_ptr<Holdings> holdings;  // the target of expected batches; null if none is expected
        u64 next = 0;
        std::size_t largest = 0;
        std::optional<AppliedRun> applied;  // applied batches that are not reported yet
    };

    // Read rounds for `read`. `had_many`: whether traffic was heavy in the previous `read`.
    Left read_rounds(double seconds, bool had_many) {
        const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        reported_.clear();
        origin_.reset();
        for (;;) {
            const bool many = batches_ >= kMany, waits = ready_.empty(), may_pause = !unreported_.empty() && !many;
            const auto round = many || had_many ? kLongRound : kRound;
            if (busy_ && waits && seconds > 0) std::this_thread::sleep_until(began_ + round);
            const auto pause = may_pause ? std::min(end, began_ + kPause) : end;
            bool others = look(waits ? pause : Clock::time_point{});
            const auto began = Clock::now();
            const std::size_t came = receive();
            // The caller must learn of a reconnection before it handles the messages that followed it.
            if (came > 0) others |= look({});
            busy_ = came > 0 && began - began_ < 2 * round;
            if (came > 0) began_ = began;
            if (came > 0 && (others || !is_expected())) return report(Left::kReceived);
            if (came > 0 && take()) return report(Left::kToReport);
            if (came > 0) batches_ = busy_ ? batches_ + came : came;
            if (others || (came == 0 && may_pause)) return report(Left::kNothing);
            if (began >= end) return report(Left::kNothing, batches_ < kMany ? kAll : began - kUnreported);
        }
    }

    // Move the applied batches whose first one was received until `until` to `reported_`, and return `left`.
    Left report(Left left, Clock::time_point until = kAll) {
        std::erase_if(unreported_, [&](int fd) {
            std::optional<AppliedRun>& applied = live_.at(fd).applied;
            if (applied->since > until) return false;
            reported_.push_back(std::move(*applied));
            applied.reset();
            return true;
        });
        return left;
    }

    // Wait until `until` for file descriptors to signal. Return whether `others_` did.
    bool look(Clock::time_point until) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        bool others = false;
        poller_.wait(static_cast<int>(std::clamp<long long>(left, 0, 1000)), [&](int fd) {
            if (fd == others_) others = true;
            else look_again(fd);
        });
        return others;
    }

    // Receive a round. Return its number of messages.
    std::size_t receive() {
        std::vector<void*> sockets;
        for (const int fd : ready_) sockets.push_back(live_.at(fd).socket);
        inbox_.receive(sockets);
        const auto& turns = inbox_.received();
        round_.assign(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(turns.size()));
        ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(turns.size()));
        std::size_t came = 0;
        for (std::size_t place = 0; place < turns.size(); ++place) {
            came += turns[place].count;
            live_.at(round_[place]).is_ready = !turns[place].drained;
            if (!turns[place].drained) ready_.push_back(round_[place]);  // after the sockets that wait for their turn
        }
        return came;
    }

    // Return whether the round consists of expected batches only.
    bool is_expected() const {
        for (std::size_t place = 0; place < round_.size(); ++place) {
            const Received& turn = inbox_.received()[place];
            const Live& live = live_.at(round_[place]);
            if (turn.count == 0) continue;
            if (!live.holdings || !turn.in_order || inbox_.seq(turn.first) != live.next || turn.largest > live.largest)
                return false;
        }
        return true;
    }

    // Apply a round of expected batches. Return whether one of them must be reported at once.
    bool take() {
        const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
        std::vector<Inbox::Run> runs;
        for (std::size_t place = 0; place < round_.size(); ++place) {
            const Received& turn = inbox_.received()[place];
            if (turn.count == 0) continue;
            Live& live = live_.at(round_[place]);
            runs.push_back({place, live.holdings});
            if (!live.applied) {
                live.applied = AppliedRun{round_[place], live.next, 0, std::make_unique<Frame>(zmq_), began_};
                unreported_.push_back(round_[place]);
            }
            AppliedRun& applied = *live.applied;
            const std::size_t last = turn.first + turn.count - 1;
            applied.last = inbox_.seq(last);
            applied.payload->share(inbox_.payload(last));
            applied.bytes += turn.bytes;
            applied.received_at = now.count();
            live.next = applied.last + 1;
            if (live.next == 0) live.holdings = nullptr;  // no sequence number is left
        }
        inbox_.address(runs);
        origin_ = inbox_.apply(index_, applied_);
        return origin_.has_value();
    }

    const Zmq zmq_;
    Index& index_;
    Inbox inbox_;
    Poller poller_;
    ReadingThreads reading_threads_;
    const int others_;
    std::unordered_map<int, Live> live_;
    std::vector<int> ready_;  // sockets with unread messages, for which libzmq signals no second time
    std::vector<int> round_;
    std::vector<AppliedRun> reported_;
    std::vector<int> unreported_;  // sockets with applied batches that are not in `reported_` yet
    std::optional<Inbox::Origin> origin_;  // the batch that must be reported at once; its outcome is `applied_`
    Applied applied_;
    Clock::time_point began_;  // the start of the last round that had messages
    bool busy_ = false;  // that round followed the previous one in quick succession
    std::size_t batches_ = 0;  // batches in quick succession during this `read`
};

}  // namespace kvrouter
