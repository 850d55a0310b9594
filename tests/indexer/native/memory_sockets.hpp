// Sockets in memory, behind the functions of libzmq that an inbox calls, and random messages for them.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <deque>

#include "inbox.hpp"
#include "random_payloads.hpp"

namespace kvrouter {

using Frames = std::vector<std::string>;

// A socket in memory. Like that of libzmq, its file descriptor signals an arrival once, until the next `receive`.
class MemorySocket {
   public:
    MemorySocket() {
        if (pipe(ends_) != 0) std::abort();
        for (const int end : ends_) fcntl(end, F_SETFL, O_NONBLOCK);
    }
    MemorySocket(const MemorySocket&) = delete;
    MemorySocket& operator=(const MemorySocket&) = delete;
    ~MemorySocket() {
        for (const int end : ends_) ::close(end);
    }

    int fd() const { return ends_[0]; }

    void send(Frames message) {
        const std::lock_guard guard(lock_);
        messages_.push_back(std::move(message));
        if (messages_.size() == 1 && write(ends_[1], "", 1) != 1) std::abort();
    }

    bool is_empty() {
        const std::lock_guard guard(lock_);
        return messages_.empty();
    }

    // Let each further message end after its first frame, without the other ones.
    void break_off() { breaks_off_ = true; }

    static Zmq functions() { return {init, receive, data, size, more, copy, close}; }

   private:
    // The content of a zmq_msg_t.
    struct Content {
        std::string bytes;
        bool more;
    };

    static Content*& content(void* message) { return *static_cast<Content**>(message); }

    static int init(void* message) {
        content(message) = nullptr;
        return 0;
    }

    static int close(void* message) {
        delete content(message);
        return init(message);
    }

    static int copy(void* to, void* from) {
        close(to);
        if (content(from) != nullptr) content(to) = new Content(*content(from));
        return 0;
    }

    static int receive(void* message, void* from, int) { return static_cast<MemorySocket*>(from)->receive(message); }
    static void* data(void* message) { return content(message)->bytes.data(); }
    static std::size_t size(const void* message) { return content(const_cast<void*>(message))->bytes.size(); }
    static int more(const void* message) { return content(const_cast<void*>(message))->more; }

    int receive(void* message) {
        const std::lock_guard guard(lock_);
        for (char signals[8]; read(ends_[0], signals, sizeof signals) > 0;) {}
        interrupts_ = !interrupts_;
        errno = interrupts_ ? EINTR : EAGAIN;
        if (interrupts_ || messages_.empty()) return -1;
        Frames& frames = messages_.front();
        if (breaks_off_ && frame_ > 0) {
            messages_.clear();
            return -1;
        }
        close(message);
        content(message) = new Content{frames[frame_], frame_ + 1 < frames.size()};
        if (++frame_ == frames.size()) {
            messages_.pop_front();
            frame_ = 0;
        }
        return 0;
    }

    std::mutex lock_;
    int ends_[2];
    std::deque<Frames> messages_;
    std::size_t frame_ = 0;  // next frame of the first message
    bool interrupts_ = false, breaks_off_ = false;
};

inline std::string big_endian(u64 number) {
    std::string bytes;
    for (int shift = 56; shift >= 0; shift -= 8) bytes += static_cast<char>(number >> shift);
    return bytes;
}

// Return a random message: usually the next batch, otherwise another batch or a malformed message.
inline Frames random_message(RandomPayloads& random, u64& seq) {
    Frames frames{"topic", big_endian(seq++), random.chance(2) ? std::string(random.below(100'000), 'x') : random.batch()};
    if (random.chance(2)) frames.resize(1 + random.below(6));
    if (random.chance(2)) random.damage(frames.back());
    if (random.chance(2)) frames[0].resize(random.below(9));
    if (random.chance(1) && frames.size() > 1) frames[1].resize(random.below(9));
    if (random.chance(2)) seq += random.below(3) - 1;
    return frames;
}

// Return a batch's sequence number, or nothing for a malformed message.
inline std::optional<u64> number_of(const Frames& frames) {
    if (frames.size() != 3 || frames[1].size() != 8) return std::nullopt;
    u64 seq = 0;
    for (const char byte : frames[1]) seq = seq << 8 | static_cast<u8>(byte);
    return seq;
}

inline std::size_t size_of(const Frames& frames) {
    std::size_t size = 0;
    for (const auto& frame : frames) size += frame.size();
    return size;
}

// Return the messages of a turn.
inline std::vector<Frames> received_of(const Inbox& inbox, const Received& turn) {
    std::vector<Frames> messages(turn.count);
    for (std::size_t at = 0; at < turn.count; ++at)
        inbox.each_frame(turn.first + at, [&](std::string_view frame) { messages[at].emplace_back(frame); });
    return messages;
}

}  // namespace kvrouter
