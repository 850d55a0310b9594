// Scheduling of the threads that read event streams, relative to the threads that answer requests.
#pragma once

#include <chrono>

#ifdef __linux__
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

#include "integers.hpp"
#endif

namespace kvrouter {

// Scheduling policy of ZeroMQ's I/O threads, which wake for each packet, and of the thread that receives from them.
//
// A thread that wakes interrupts another one on its processor, which may be answering a request. Under heavy traffic,
// the reading threads therefore wait until that thread pauses or its time slice ends: messages are collected until the
// next round anyway. Before the receiving thread asks for Python's lock, it becomes urgent instead: other threads release
// that lock only for moments.
class ReadingThreads {
   public:
    ReadingThreads() = default;
    ReadingThreads(const ReadingThreads&) = delete;
    ReadingThreads& operator=(const ReadingThreads&) = delete;
    ~ReadingThreads() {
        if (patient_) schedule_others(Turns::kUsual);
    }

    // Start to receive in the calling thread. `much`: whether traffic is heavy.
    void begin(bool much) {
        const auto now = std::chrono::steady_clock::now();
        if (much) last_ = now;
        const bool patient = much || (patient_ && now - last_ < kCalm);
        const Turns turns = patient ? Turns::kPatient : Turns::kUsual;
        if (patient || patient_) schedule(kThisThread, turns);
        if (patient != patient_) schedule_others(turns);
        patient_ = patient;
    }

    // Make the calling thread urgent, before it asks for Python's lock.
    void end() const {
        if (patient_) schedule(kThisThread, Turns::kPrompt);
    }

   private:
    static constexpr std::chrono::seconds kCalm{1};  // traffic is light again after this time without heavy traffic
    static constexpr int kThisThread = 0;

    // kPatient: does not interrupt others. kPrompt: runs soon after it wakes.
    enum class Turns { kUsual, kPatient, kPrompt };

#ifdef __linux__
    // The shortest time slice that Linux allows. From Linux 6.12 on, threads with a shorter slice run earlier.
    static constexpr u64 kShortNs = 100'000;

    // `struct sched_attr` of sched_setattr(2), which not every C library declares.
    struct Attributes {
        u32 size, policy;
        u64 flags;
        std::int32_t nice;
        u32 priority;
        u64 turn_ns, deadline, period;
    };

    // Set the policy of ZeroMQ's I/O threads.
    static void schedule_others(Turns turns) {
        std::error_code failed;
        auto thread = std::filesystem::directory_iterator("/proc/self/task", failed);
        for (; !failed && thread != std::filesystem::directory_iterator(); thread.increment(failed)) {
            std::string name;
            std::getline(std::ifstream(thread->path() / "comm"), name);
            if (name.find("ZMQbg/IO") != name.npos) schedule(std::atoi(thread->path().filename().c_str()), turns);
        }
    }

    // Set a thread's policy, if the process may. A thread that has a special policy keeps it.
    static void schedule(int thread, Turns turns) {
        Attributes its{};
        if (syscall(SYS_sched_getattr, thread, &its, sizeof its, 0) != 0) return;
        if (its.policy != SCHED_OTHER && its.policy != SCHED_BATCH) return;
        its.policy = turns == Turns::kPatient ? SCHED_BATCH : SCHED_OTHER;
        its.turn_ns = turns == Turns::kPrompt ? kShortNs : 0;
        syscall(SYS_sched_setattr, thread, &its, 0);
    }
#else
    static void schedule_others(Turns) {}
    static void schedule(int, Turns) {}
#endif

    bool patient_ = false;
    std::chrono::steady_clock::time_point last_;  // the last time of heavy traffic
};

}  // namespace kvrouter
