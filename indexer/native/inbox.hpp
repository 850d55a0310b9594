// Receives live messages from the streams' sockets and applies them to the index, without holding Python's lock.
#pragma once

#include <cerrno>
#include <deque>
#include <span>

#include "index.hpp"

namespace kvrouter {

// The functions of the libzmq library that created the sockets.
struct Zmq {
    int (*init)(void* message);
    int (*receive)(void* message, void* socket, int flags);
    void* (*data)(void* message);
    std::size_t (*size)(const void* message);
    int (*more)(const void* message);
    int (*copy)(void* to, void* from);  // shares the bytes
    int (*close)(void* message);
};

// A zmq_msg_t that holds one received frame without a copy. It cannot be moved, because it contains the bytes of a
// short frame itself.
class Frame {
   public:
    explicit Frame(const Zmq& zmq) : zmq_(zmq) { zmq_.init(memory_); }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;
    ~Frame() { zmq_.close(memory_); }

    bool receive(void* socket) {
        int received;
        do received = zmq_.receive(memory_, socket, kDontWait);
        while (received < 0 && errno == EINTR);
        return received >= 0;
    }
    void share(const Frame& other) { zmq_.copy(memory_, other.memory_); }
    void clear() {
        zmq_.close(memory_);
        zmq_.init(memory_);
    }
    std::string_view bytes() const { return {static_cast<const char*>(zmq_.data(memory_)), zmq_.size(memory_)}; }
    bool is_followed() const { return zmq_.more(memory_) != 0; }

   private:
    static constexpr int kDontWait = 1;  // ZMQ_DONTWAIT

    const Zmq& zmq_;
    alignas(void*) mutable unsigned char memory_[64];  // `mutable`: libzmq's getters take no const pointer
};

// The messages that one socket delivered in one turn.
struct Received {
    bool drained = false;  // the socket has no more messages
    std::size_t first = 0, count = 0;  // numbers of messages in the inbox
    std::size_t bytes = 0, largest = 0;
    bool in_order = true;  // all messages are batches with consecutive sequence numbers
};

// The messages of one round over the live sockets. Not safe for use by several threads.
class Inbox {
   public:
    static constexpr std::size_t kMessagesATurn = 64, kBytesATurn = 64 << 10;  // limits of one socket's turn
    static constexpr std::size_t kBytesARound = 256 << 10;  // limit of a round, so that other work is not delayed

    explicit Inbox(const Zmq& zmq) : zmq_(zmq) {}

    // Drop the previous round, and receive one turn of messages from each socket until the round is full.
    void receive(const std::vector<void*>& sockets) {
        clear();
        for (void* const socket : sockets) {
            if (bytes_ >= kBytesARound) return;
            receive_turn(socket);
        }
    }

    // The turns of the last round, in the order of the sockets. Sockets beyond the round's limit have no turn.
    const std::vector<Received>& received() const { return received_; }

    // Return the sequence number of a message. It is valid only in a turn that is in order.
    u64 seq(std::size_t message) const { return messages_[message].seq; }

    const Frame& payload(std::size_t message) const { return frames_[messages_[message].last_frame]; }

    // Call `call` with each of a message's frames.
    template <typename Call>
    void each_frame(std::size_t message, Call call) const {
        std::size_t at = message == 0 ? 0 : messages_[message - 1].last_frame + 1;
        for (; at <= messages_[message].last_frame; ++at) call(frames_[at].bytes());
    }

    // The messages of one turn (`place` in the round) and the target to which they apply.
    struct Run {
        std::size_t place;
        std::shared_ptr<Holdings> holdings;
    };

    // Choose the turns that `apply` will apply. Each must be in order.
    void address(const std::vector<Run>& runs) {
        addressed_.clear();
        origins_.clear();
        applied_ = 0;
        for (const auto& [place, holdings] : runs) {
            const Received& turn = received_.at(place);
            for (std::size_t message = turn.first; message < turn.first + turn.count; ++message) {
                addressed_.push_back({holdings, payload(message).bytes()});
                origins_.push_back({place, message});
            }
        }
    }

    struct Origin {
        std::size_t place, message;
    };

    // Apply addressed batches until one must be reported to the caller. Return that batch, with its outcome in `last`,
    // or nothing once all are applied.
    std::optional<Origin> apply(Index& index, Applied& last) {
        const auto left = std::span(addressed_).subspan(applied_);
        if (left.empty()) return std::nullopt;
        applied_ += index.apply_all(left, last);
        if (!last.tells()) return std::nullopt;
        return origins_[applied_ - 1];
    }

   private:
    struct Message {
        u64 seq;
        std::size_t last_frame;
    };

    static constexpr std::size_t kKeptFrames = 4096;  // empty frames that are reused in the next round

    void clear() {
        addressed_.clear();
        received_.clear();
        messages_.clear();
        drop_frames(0);
        while (frames_.size() > kKeptFrames) frames_.pop_back();
        bytes_ = 0;
    }

    // Clear all received frames but the first `kept`.
    void drop_frames(std::size_t kept) {
        while (came_ > kept) frames_[--came_].clear();
    }

    void receive_turn(void* socket) {
        Received turn;
        turn.first = messages_.size();
        while (turn.count < kMessagesATurn && turn.bytes < kBytesATurn) {
            const std::size_t before = bytes_;
            if (!receive_message(socket, turn)) {
                turn.drained = true;
                break;
            }
            ++turn.count;
            turn.bytes += bytes_ - before;
            turn.largest = std::max(turn.largest, bytes_ - before);
        }
        received_.push_back(turn);
    }

    // Receive one message. Return false if the socket has no whole message.
    bool receive_message(void* socket, Received& turn) {
        const std::size_t first = came_, before = bytes_;
        bool is_followed;
        do {
            if (came_ == frames_.size()) frames_.emplace_back(zmq_);
            Frame& frame = frames_[came_];
            if (!frame.receive(socket)) {
                drop_frames(first);  // the rest of an incomplete message never arrives
                bytes_ = before;
                return false;
            }
            ++came_;
            bytes_ += frame.bytes().size();
            is_followed = frame.is_followed();
        } while (is_followed);
        const bool well_formed = came_ - first == 3 && frames_[first + 1].bytes().size() == sizeof(u64);
        const u64 seq = well_formed ? big_endian(frames_[first + 1].bytes()) : 0;
        turn.in_order &= well_formed && (turn.count == 0 || (seq != 0 && messages_.back().seq == seq - 1));
        messages_.push_back({seq, came_ - 1});
        return true;
    }

    static u64 big_endian(std::string_view bytes) {
        u64 number = 0;
        for (const char byte : bytes) number = number << 8 | static_cast<u8>(byte);
        return number;
    }

    const Zmq zmq_;
    std::deque<Frame> frames_;  // reused in every round
    std::size_t came_ = 0, bytes_ = 0;  // number and bytes of the frames that hold a received frame
    std::vector<Message> messages_;
    std::vector<Received> received_;
    std::vector<Index::Addressed> addressed_;
    std::vector<Origin> origins_;  // by addressed batch
    std::size_t applied_ = 0;
};

}  // namespace kvrouter
