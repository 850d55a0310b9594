// Live sockets, read round after round: what is expected of them is applied, anything else is left to the caller.
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

// What was received of a socket and applied: batches that follow one another.
struct Taken {
    int fd;
    u64 first, last;  // sequence numbers
    std::unique_ptr<Frame> payload;  // of the last one
    std::chrono::steady_clock::time_point since;  // the first one was received
    std::size_t bytes = 0;  // of all of them
    double received_at = 0;  // the last one (unix seconds)
};

// For one thread.
class LiveReader {
   public:
    // `others`: a file descriptor of whatever else the caller has to look at.
    LiveReader(const Zmq& zmq, Index& index, int others) : zmq_(zmq), index_(index), inbox_(zmq_), others_(others) {
        poller_.add(others);
    }

    void follow(int fd, void* socket) {
        poller_.add(fd);
        live_[fd].socket = socket;
        look_again(fd);  // it may have told before
    }

    void leave(int fd) {
        poller_.remove(fd);
        live_.erase(fd);
        std::erase(ready_, fd);
        std::erase(untold_, fd);
    }

    // What a socket has may not be told any more.
    void look_again(int fd) {
        Live& live = live_.at(fd);
        if (!live.is_ready) ready_.push_back(fd);
        live.is_ready = true;
    }

    // Batches of a socket from `seq` on are for a target, as long as none has more bytes than `largest`.
    void expect(int fd, u32 number, u64 seq, std::size_t largest) {
        Live& live = live_.at(fd);
        live.holdings = index_.holdings(number);
        live.next = seq;
        live.largest = largest;
    }

    // Whatever comes is for the caller.
    void expect_nothing(int fd) { live_.at(fd).holdings = nullptr; }

    enum class Left {
        kNothing,
        kToTell,  // batches to be applied, the first of which there is something to tell of
        kReceived,  // what was received
    };

    // Wait so long, at most, for something to come, and receive it in rounds, as long as they have what is expected, and
    // nothing else: until there is a pause, or of much that comes until the time is up. What is left of the last round.
    Left read(double seconds) {
        const bool had_many = std::exchange(batches_, 0) >= kMany;
        reading_threads_.begin(had_many);
        const Left left = read_rounds(seconds, had_many);
        reading_threads_.end();
        return left;
    }

    // Whether something was taken, and not told of by the last reading.
    bool has_untold() const { return !untold_.empty(); }

    // That is told of now.
    void rest() {
        taken_.clear();
        told_of(Left::kNothing);
    }

    // By socket, what was expected and is told of.
    const std::vector<Taken>& taken() const { return taken_; }

    // The sockets of the last round, by place.
    const std::vector<int>& round() const { return round_; }

    const Inbox& inbox() const { return inbox_; }

    // What came at these places of the last round is for these targets, to be applied.
    void address(const std::vector<std::pair<std::size_t, u32>>& runs) {
        std::vector<Inbox::Run> addressed;
        for (const auto& [place, number] : runs) addressed.push_back({place, index_.holdings(number)});
        inbox_.address(addressed);
    }

    // See `Inbox::apply`.
    std::optional<Inbox::Origin> apply(Applied& last) {
        if (!told_) return inbox_.apply(index_, last);
        last = std::move(applied_);
        return std::exchange(told_, std::nullopt);
    }

   private:
    using Clock = std::chrono::steady_clock;
    // A fleet's streams are not in step, and each batch that is read alone takes a processor from whoever has it.
    static constexpr std::chrono::milliseconds kRound{1}, kLongRound{4};
    // The caller hears of what came when nothing has come for so long: it needs Python's lock, and so does the answer of
    // who asks for what has just come.
    static constexpr std::chrono::milliseconds kPause{5};
    // Of batches that come closely: where there are so many rounds are long, and no pause is waited for.
    static constexpr std::size_t kMany = 32;
    // There the caller need not hear of each stream more often than this.
    static constexpr std::chrono::milliseconds kUntold{500};
    static constexpr Clock::time_point kAll = Clock::time_point::max();

    struct Live {
        void* socket = nullptr;
        bool is_ready = false;
        std::shared_ptr<Holdings> holdings;  // of whom batches are expected; none: of nobody
        u64 next = 0;
        std::size_t largest = 0;
        std::optional<Taken> taken;  // and not told of
    };

    // What `read` does. `had_many`: the last time.
    Left read_rounds(double seconds, bool had_many) {
        const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
        taken_.clear();
        told_.reset();
        for (;;) {
            const bool many = batches_ >= kMany, waits = ready_.empty(), may_pause = !untold_.empty() && !many;
            const auto round = many || had_many ? kLongRound : kRound;
            if (busy_ && waits && seconds > 0) std::this_thread::sleep_until(began_ + round);
            const auto pause = may_pause ? std::min(end, began_ + kPause) : end;
            bool others = look(waits ? pause : Clock::time_point{});
            const auto began = Clock::now();
            const std::size_t came = receive();
            if (came > 0) others |= look({});  // a reconnection must be known before what came by it
            busy_ = came > 0 && began - began_ < 2 * round;
            if (came > 0) began_ = began;
            if (came > 0 && (others || !is_expected())) return told_of(Left::kReceived);
            if (came > 0 && take()) return told_of(Left::kToTell);
            if (came > 0) batches_ = busy_ ? batches_ + came : came;
            if (others || (came == 0 && may_pause)) return told_of(Left::kNothing);
            if (began >= end) return told_of(Left::kNothing, batches_ < kMany ? kAll : began - kUntold);
        }
    }

    // What was taken until then is told of.
    Left told_of(Left left, Clock::time_point until = kAll) {
        std::erase_if(untold_, [&](int fd) {
            std::optional<Taken>& taken = live_.at(fd).taken;
            if (taken->since > until) return false;
            taken_.push_back(std::move(*taken));
            taken.reset();
            return true;
        });
        return left;
    }

    // Wait until then for something to come, and learn where. Whether at the others.
    bool look(Clock::time_point until) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(until - Clock::now()).count();
        bool others = false;
        poller_.wait(static_cast<int>(std::clamp<long long>(left, 0, 1000)), [&](int fd) {
            if (fd == others_) others = true;
            else look_again(fd);
        });
        return others;
    }

    // Receive a round. How many messages came.
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
            if (!turns[place].drained) ready_.push_back(round_[place]);  // behind the others
        }
        return came;
    }

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

    // Apply a round. Whether there is something to tell of it.
    bool take() {
        const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
        std::vector<Inbox::Run> runs;
        for (std::size_t place = 0; place < round_.size(); ++place) {
            const Received& turn = inbox_.received()[place];
            if (turn.count == 0) continue;
            Live& live = live_.at(round_[place]);
            runs.push_back({place, live.holdings});
            if (!live.taken) {
                live.taken = Taken{round_[place], live.next, 0, std::make_unique<Frame>(zmq_), began_};
                untold_.push_back(round_[place]);
            }
            Taken& taken = *live.taken;
            const std::size_t last = turn.first + turn.count - 1;
            taken.last = inbox_.seq(last);
            taken.payload->share(inbox_.payload(last));
            taken.bytes += turn.bytes;
            taken.received_at = now.count();
            live.next = taken.last + 1;
            if (live.next == 0) live.holdings = nullptr;  // that was the last number
        }
        inbox_.address(runs);
        told_ = inbox_.apply(index_, applied_);
        return told_.has_value();
    }

    const Zmq zmq_;
    Index& index_;
    Inbox inbox_;
    Poller poller_;
    ReadingThreads reading_threads_;
    const int others_;
    std::unordered_map<int, Live> live_;
    std::vector<int> ready_;  // nothing tells again of what is left there
    std::vector<int> round_;
    std::vector<Taken> taken_;
    std::vector<int> untold_;  // sockets of which something was taken that is not there yet
    std::optional<Inbox::Origin> told_;  // not told yet, and what became of it
    Applied applied_;
    Clock::time_point began_;  // the last round in which something came
    bool busy_ = false;  // that one followed another closely
    std::size_t batches_ = 0;  // of this reading, that came closely
};

}  // namespace kvrouter
