// ZeroMQ's threads, which read from the network, and whom they may take a processor from.
#pragma once

#include <chrono>

#ifdef __linux__
#include <sched.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#endif

namespace kvrouter {

// Each packet wakes one of them, and the kernel lets it have the processor of whoever answers a request there. Where
// much comes, they wait for that one's pause, or for the end of its time: messages gather until the next round anyway.
class IoThreads {
   public:
    IoThreads() = default;
    IoThreads(const IoThreads&) = delete;
    IoThreads& operator=(const IoThreads&) = delete;
    ~IoThreads() {
        if (patient_) schedule(false);
    }

    // Whether much came of late.
    void told(bool much) {
        const auto now = std::chrono::steady_clock::now();
        if (much) last_ = now;
        const bool patient = much || (patient_ && now - last_ < kCalm);
        if (patient != patient_) schedule(patient);
        patient_ = patient;
    }

   private:
    static constexpr std::chrono::seconds kCalm{1};  // nothing much came for so long

#ifdef __linux__
    // Where it is not allowed, all stays as it is.
    static void schedule(bool patient) {
        std::error_code failed;
        auto thread = std::filesystem::directory_iterator("/proc/self/task", failed);
        for (; !failed && thread != std::filesystem::directory_iterator(); thread.increment(failed)) {
            std::string name;
            std::getline(std::ifstream(thread->path() / "comm"), name);
            const int id = std::atoi(thread->path().filename().c_str());
            const sched_param priority{};
            if (name.find("ZMQbg/IO") != name.npos && sched_getscheduler(id) == (patient ? SCHED_OTHER : SCHED_BATCH))
                sched_setscheduler(id, patient ? SCHED_BATCH : SCHED_OTHER, &priority);
        }
    }
#else
    static void schedule(bool) {}
#endif

    bool patient_ = false;
    std::chrono::steady_clock::time_point last_;  // that much came
};

}  // namespace kvrouter
