// The threads that read streams, and whom they may take a processor from.
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

// ZeroMQ's, of which each packet wakes one, and the one that receives from them, which wakes for each round: the kernel
// lets them have the processor of whoever answers a request there. Where much comes, they wait for that one's pause, or
// for the end of its time: messages gather until the next round anyway. But not for Python's lock: who has it gives it up
// for moments only, and has it again by the end of its time.
class ReadingThreads {
   public:
    ReadingThreads() = default;
    ReadingThreads(const ReadingThreads&) = delete;
    ReadingThreads& operator=(const ReadingThreads&) = delete;
    ~ReadingThreads() {
        if (patient_) schedule_others(Turns::kUsual);
    }

    // The thread that calls begins to receive. `much`: whether much came of late.
    void begin(bool much) {
        const auto now = std::chrono::steady_clock::now();
        if (much) last_ = now;
        const bool patient = much || (patient_ && now - last_ < kCalm);
        const Turns turns = patient ? Turns::kPatient : Turns::kUsual;
        if (patient || patient_) schedule(kThisThread, turns);
        if (patient != patient_) schedule_others(turns);
        patient_ = patient;
    }

    // It is about to ask for Python's lock.
    void end() const {
        if (patient_) schedule(kThisThread, Turns::kPrompt);
    }

   private:
    static constexpr std::chrono::seconds kCalm{1};  // nothing much came for so long
    static constexpr int kThisThread = 0;

    enum class Turns { kUsual, kPatient, kPrompt };

#ifdef __linux__
    // As short as Linux allows: who asks for shorter turns than others goes first (6.12; before it, that is for nothing).
    static constexpr u64 kShortNs = 100'000;

    // As sched_setattr(2) has it; not every C library does.
    struct Attributes {
        u32 size, policy;
        u64 flags;
        std::int32_t nice;
        u32 priority;
        u64 turn_ns, deadline, period;
    };

    // ZeroMQ's.
    static void schedule_others(Turns turns) {
        std::error_code failed;
        auto thread = std::filesystem::directory_iterator("/proc/self/task", failed);
        for (; !failed && thread != std::filesystem::directory_iterator(); thread.increment(failed)) {
            std::string name;
            std::getline(std::ifstream(thread->path() / "comm"), name);
            if (name.find("ZMQbg/IO") != name.npos) schedule(std::atoi(thread->path().filename().c_str()), turns);
        }
    }

    // Where it is not allowed, all stays as it is; so does a thread that somebody gave another policy.
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
    std::chrono::steady_clock::time_point last_;  // that much came
};

}  // namespace kvrouter
