// A lock with turns: a thread that needs it for long releases it regularly for waiting threads.
#pragma once

#include <atomic>
#include <mutex>

#include "msgpack.hpp"

namespace kvrouter {

class TurnLock {
   public:
    void lock() {
        ++waiting_;
        next_.lock();
        held_.lock();
        next_.unlock();
        --waiting_;
    }
    void unlock() { held_.unlock(); }
    bool is_wanted() const { return waiting_.load(std::memory_order_relaxed) > 0; }

   private:
    std::mutex next_;  // held by the next owner, so that the last one cannot overtake it
    std::mutex held_;
    std::atomic<int> waiting_ = 0;
};

// The turns of a long operation. Between two turns, other threads may change everything that the operation does not own.
class Turns {
   public:
    explicit Turns(TurnLock& lock) : lock_(lock) { lock_.lock(); }
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;
    ~Turns() { lock_.unlock(); }

    // Count finished work. After a certain amount, other threads have their turn.
    void did(std::size_t blocks) {
        done_ += blocks;
        if (done_ >= kBlocksATurn) end();
    }

    void end() {
        done_ = 0;
        if (!lock_.is_wanted()) return;
        lock_.unlock();
        lock_.lock();
    }

   private:
    static constexpr std::size_t kBlocksATurn = 256;

    TurnLock& lock_;
    std::size_t done_ = 0;
};

}  // namespace kvrouter
