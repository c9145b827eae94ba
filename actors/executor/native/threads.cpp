// The thread pool: tasks are claimed from a shared counter, and idle workers spin before they sleep.
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

// A step of a model is a few hundred jobs with microseconds between them: waking a sleeping worker would take longer
// than a job.
constexpr std::chrono::microseconds kSpinTime{50};
constexpr int kPausesPerCheck = 32;
constexpr int kThreadsMax = 1024;

void cpu_relax() {
#if CUE_X86
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

// Spin until `ready()`; false after kSpinTime.
template <class Ready>
bool spin_until(Ready ready) {
    const auto begin = std::chrono::steady_clock::now();
    do {
        for (int i = 0; i < kPausesPerCheck; ++i) {
            if (ready()) return true;
            cpu_relax();
        }
    } while (std::chrono::steady_clock::now() - begin < kSpinTime);
    return ready();
}

thread_local bool in_task = false;

class ThreadPool {
public:
    explicit ThreadPool(int workers) {
        // Workers block all signals: handlers run on the host program's threads.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            for (int i = 0; i < workers; ++i) threads_.emplace_back([this] { worker_loop(); });
        } catch (const std::system_error&) {
            // The system refused a thread: the existing ones do the work.
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    ~ThreadPool() {
        stop_.store(true);
        wake_workers();
        for (auto& thread : threads_) thread.join();
    }

    void run_job(int tasks, void (*run)(void*, int), void* context) {
        run_ = run;
        context_ = context;
        tasks_ = tasks;
        finished_.store(0, std::memory_order_relaxed);
        unclaimed_.store(static_cast<uint32_t>(tasks));
        if (sleeping_.load() > 0) wake_workers();
        run_tasks();
        while (!spin_until([&] { return finished_.load(std::memory_order_acquire) == tasks; })) sched_yield();
    }

private:
    // Claim and run tasks until none are left. A claim is valid for whichever job it belongs to: a job's fields are
    // written before its tasks are offered, and stay until every claimed task is finished.
    void run_tasks() {
        for (;;) {
            uint32_t unclaimed = unclaimed_.load(std::memory_order_relaxed);
            do {
                if (unclaimed == 0) return;
            } while (!unclaimed_.compare_exchange_weak(unclaimed, unclaimed - 1));
            run_(context_, tasks_ - static_cast<int>(unclaimed));
            finished_.fetch_add(1, std::memory_order_release);
        }
    }

    bool has_work() const { return unclaimed_.load() != 0 || stop_.load(); }

    void worker_loop() {
        in_task = true;
        while (!stop_.load()) {
            if (!spin_until([this] { return has_work(); })) wait_for_work();
            run_tasks();
        }
    }

    void wait_for_work() {
        std::unique_lock<std::mutex> lock(sleep_mutex_);
        // Count as sleeping before the last check; `run_job` offers its tasks before it reads the count. One of the two
        // sees the other.
        sleeping_.fetch_add(1);
        work_available_.wait(lock, [this] { return has_work(); });
        sleeping_.fetch_sub(1);
    }

    void wake_workers() {
        {
            std::lock_guard<std::mutex> lock(sleep_mutex_);
        }
        work_available_.notify_all();
    }

    alignas(64) std::atomic<uint32_t> unclaimed_{0};  // tasks not yet claimed
    alignas(64) std::atomic<int> finished_{0};
    alignas(64) void (*run_)(void*, int) = nullptr;
    void* context_ = nullptr;
    int tasks_ = 0;
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    std::mutex sleep_mutex_;
    std::condition_variable work_available_;
    std::vector<std::thread> threads_;
};

int available_processors() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
    const int count = static_cast<int>(std::thread::hardware_concurrency());
    return count > 0 ? count : 1;
}

// Never destroyed: workers may sleep at exit, and the process does not wait for them.
struct SharedState {
    std::mutex caller_turn;  // held while a caller uses or replaces the pool
    ThreadPool* pool = nullptr;
    std::atomic<int> threads{available_processors()};
};

SharedState* shared = nullptr;

// A forked child has no workers, and its copy of the mutex may be locked by a thread that does not exist.
void after_fork_in_child() {
    const int threads = shared->threads.load();
    shared = new SharedState;
    shared->threads.store(threads);
}

SharedState& shared_state() {
    static const bool initialized = [] {
        shared = new SharedState;
        pthread_atfork(nullptr, nullptr, after_fork_in_child);
        return true;
    }();
    (void)initialized;
    return *shared;
}

void run_serially(int tasks, void (*run)(void*, int), void* context) {
    for (int task = 0; task < tasks; ++task) run(context, task);
}

}  // namespace

void parallel(int tasks, void (*run)(void*, int), void* context) {
    SharedState& state = shared_state();
    if (tasks <= 1 || in_task || state.threads.load(std::memory_order_relaxed) == 1)
        return run_serially(tasks, run, context);
    std::lock_guard<std::mutex> caller_turn(state.caller_turn);
    if (state.pool == nullptr) state.pool = new ThreadPool(state.threads.load() - 1);
    in_task = true;
    state.pool->run_job(tasks, run, context);
    in_task = false;
}

}  // namespace cue

extern "C" void cue_parallel(int tasks, void (*run)(void*, int), void* context) { cue::parallel(tasks, run, context); }

extern "C" int cue_threads() { return cue::shared_state().threads.load(); }

extern "C" void cue_set_threads(int count) {
    cue::SharedState& state = cue::shared_state();
    std::lock_guard<std::mutex> caller_turn(state.caller_turn);
    const int bounded = count < 1 ? 1 : count < cue::kThreadsMax ? count : cue::kThreadsMax;
    if (bounded == state.threads.load()) return;
    delete state.pool;
    state.pool = nullptr;
    state.threads.store(bounded);
}
