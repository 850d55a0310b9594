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
#endif

namespace kvrouter {

// ZeroMQ's, of which each packet wakes one, and the one that receives from them, which wakes for each round: the kernel
// lets them have the processor of whoever answers a request there. Where much comes, they wait for that one's pause, or
// for the end of its time: messages gather until the next round anyway.
class ReadingThreads {
   public:
    ReadingThreads() = default;
    ReadingThreads(const ReadingThreads&) = delete;
    ReadingThreads& operator=(const ReadingThreads&) = delete;
    ~ReadingThreads() {
        if (patient_) schedule(false);
    }

    // Whether much came of late, to the thread that calls.
    void told(bool much) {
        const auto now = std::chrono::steady_clock::now();
        if (much) last_ = now;
        const bool patient = much || (patient_ && now - last_ < kCalm);
        if (patient != patient_) {
            receiver_ = this_thread();
            schedule(patient);
        }
        patient_ = patient;
    }

   private:
    static constexpr std::chrono::seconds kCalm{1};  // nothing much came for so long

#ifdef __linux__
    static int this_thread() { return static_cast<int>(syscall(SYS_gettid)); }

    void schedule(bool patient) const {
        schedule(receiver_, patient);
        std::error_code failed;
        auto thread = std::filesystem::directory_iterator("/proc/self/task", failed);
        for (; !failed && thread != std::filesystem::directory_iterator(); thread.increment(failed)) {
            std::string name;
            std::getline(std::ifstream(thread->path() / "comm"), name);
            if (name.find("ZMQbg/IO") != name.npos) schedule(std::atoi(thread->path().filename().c_str()), patient);
        }
    }

    // Where it is not allowed, all stays as it is.
    static void schedule(int thread, bool patient) {
        const sched_param priority{};
        if (sched_getscheduler(thread) == (patient ? SCHED_OTHER : SCHED_BATCH))
            sched_setscheduler(thread, patient ? SCHED_BATCH : SCHED_OTHER, &priority);
    }
#else
    static int this_thread() { return 0; }
    void schedule(bool) const {}
#endif

    bool patient_ = false;
    int receiver_ = 0;
    std::chrono::steady_clock::time_point last_;  // that much came
};

}  // namespace kvrouter
