#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "isa.h"

namespace cue {
namespace {

// A step of a model is a few hundred jobs with pauses of microseconds between them: a worker that slept through each
// pause would take longer to wake than the job takes.
constexpr std::chrono::microseconds kSpin{50};
constexpr int kPausesPerLook = 32;
constexpr int kThreadsMax = 1024;

void pause() {
#if CUE_X86
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until `ready()`; false if it took longer than kSpin.
template <class Ready>
bool spin(Ready ready) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (ready()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() - begin < kSpin);
    return ready();
}

thread_local bool in_task = false;

class Pool {
public:
    explicit Pool(int workers) {
        // Signals are for the threads of the host program.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { work(); });
        } catch (const std::system_error&) {
            // No more threads to be had: the others do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~Pool() {
        stop_.store(true);
        wake();
        for (auto& thread : threads_) thread.join();
    }

    void job(int tasks, void (*run)(void*, int), void* context) {
        run_ = run;
        context_ = context;
        tasks_ = tasks;
        done_.store(0, std::memory_order_relaxed);
        left_.store(static_cast<uint32_t>(tasks));
        if (asleep_.load() > 0) wake();
        take_part();
        while (!spin([&] { return done_.load(std::memory_order_acquire) == tasks; })) sched_yield();
    }

private:
    // Claim and run tasks until none are left. A claim is valid whatever job it finds: the fields of that job were
    // written before its tasks were offered, and stay until the claimed task is done.
    void take_part() {
        for (;;) {
            uint32_t left = left_.load(std::memory_order_relaxed);
            do {
                if (left == 0) return;
            } while (!left_.compare_exchange_weak(left, left - 1));
            run_(context_, tasks_ - static_cast<int>(left));
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    bool called() const { return left_.load() != 0 || stop_.load(); }

    void work() {
        in_task = true;
        while (!stop_.load()) {
            if (!spin([this] { return called(); })) sleep();
            take_part();
        }
    }

    void sleep() {
        std::unique_lock<std::mutex> lock(bed_);
        // Counted before the last look, as `job` offers its tasks before it counts: one of the two sees the other.
        asleep_.fetch_add(1);
        alarm_.wait(lock, [this] { return called(); });
        asleep_.fetch_sub(1);
    }

    void wake() {
        { std::lock_guard<std::mutex> lock(bed_); }
        alarm_.notify_all();
    }

    alignas(64) std::atomic<uint32_t> left_{0};  // tasks not yet claimed
    alignas(64) std::atomic<int> done_{0};
    alignas(64) void (*run_)(void*, int) = nullptr;
    void* context_ = nullptr;
    int tasks_ = 0;
    std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex bed_;
    std::condition_variable alarm_;
    std::vector<std::thread> threads_;
};

int processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const int count = static_cast<int>(std::thread::hardware_concurrency());
    return count > 0 ? count : 1;
}

// Never destroyed: at exit the workers sleep, and nobody must wait for them.
struct Shared {
    std::mutex turn;  // held by whoever has the pool do something
    Pool* pool = nullptr;
    std::atomic<int> threads{processors()};
};

Shared* shared = nullptr;

// A forked child has none of the workers, and its copy of the mutex may be held by a thread that is not there.
void after_fork_in_child() {
    const int threads = shared->threads.load();
    shared = new Shared;
    shared->threads.store(threads);
}

Shared& state() {
    static const bool made = [] {
        shared = new Shared;
        pthread_atfork(nullptr, nullptr, after_fork_in_child);
        return true;
    }();
    (void)made;
    return *shared;
}

void alone(int tasks, void (*run)(void*, int), void* context) {
    for (int task = 0; task < tasks; ++task) run(context, task);
}

}  // namespace

void parallel(int tasks, void (*run)(void*, int), void* context) {
    Shared& here = state();
    if (tasks <= 1 || in_task || here.threads.load(std::memory_order_relaxed) == 1) return alone(tasks, run, context);
    std::lock_guard<std::mutex> turn(here.turn);
    if (here.pool == nullptr) here.pool = new Pool(here.threads.load() - 1);
    in_task = true;
    here.pool->job(tasks, run, context);
    in_task = false;
}

}  // namespace cue

extern "C" void cue_parallel(int tasks, void (*run)(void*, int), void* context) { cue::parallel(tasks, run, context); }

extern "C" int cue_threads() { return cue::state().threads.load(); }

extern "C" void cue_set_threads(int count) {
    cue::Shared& here = cue::state();
    std::lock_guard<std::mutex> turn(here.turn);
    const int bounded = count < 1 ? 1 : count < cue::kThreadsMax ? count : cue::kThreadsMax;
    if (bounded == here.threads.load()) return;
    delete here.pool;
    here.pool = nullptr;
    here.threads.store(bounded);
}
