// Waits until file descriptors are readable.
#pragma once

#ifdef __linux__
#include <sys/epoll.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#else
#include <poll.h>

#include <vector>
#endif

namespace kvrouter {

#ifdef __linux__

class Poller {
   public:
    Poller() : epoll_(epoll_create1(EPOLL_CLOEXEC)) {
        if (epoll_ < 0) fail("epoll_create1");
    }
    Poller(const Poller&) = delete;
    Poller& operator=(const Poller&) = delete;
    ~Poller() { close(epoll_); }

    void add(int fd) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = fd;
        if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &event) != 0) fail("epoll_ctl");
    }

    void remove(int fd) { epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr); }

    // Wait at most `milliseconds`, and call `call` with each readable file descriptor.
    template <typename Call>
    void wait(int milliseconds, Call call) {
        epoll_event events[kAtOnce];  // further file descriptors are reported by the next call
        const int count = epoll_wait(epoll_, events, kAtOnce, milliseconds);
        for (int at = 0; at < count; ++at) call(events[at].data.fd);
    }

   private:
    [[noreturn]] static void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

    static constexpr int kAtOnce = 256;

    const int epoll_;
};

#else

class Poller {
   public:
    void add(int fd) { polled_.push_back({fd, POLLIN, 0}); }

    void remove(int fd) {
        std::erase_if(polled_, [fd](const pollfd& each) { return each.fd == fd; });
    }

    // Wait at most `milliseconds`, and call `call` with each readable file descriptor.
    template <typename Call>
    void wait(int milliseconds, Call call) {
        if (poll(polled_.data(), static_cast<nfds_t>(polled_.size()), milliseconds) <= 0) return;
        for (const pollfd& each : polled_)
            if (each.revents != 0) call(each.fd);
    }

   private:
    std::vector<pollfd> polled_;
};

#endif

}  // namespace kvrouter
