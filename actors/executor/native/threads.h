// One pool of threads for all kernels: the calling thread and `cue_threads() - 1` workers.
#pragma once

#include <type_traits>

namespace cue {

// Run `run(context, task)` for each task from 0 to `tasks - 1`, in any order, on all threads, and return when all have
// finished. Concurrent callers wait for each other. A task must not throw. A call from within a task runs on the
// calling thread alone.
void parallel(int tasks, void (*run)(void* context, int task), void* context);

// The same for a callable `void(int task)`.
template <class Body>
void parallel(int tasks, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    auto run = [](void* context, int task) { (*static_cast<Callable*>(context))(task); };
    parallel(tasks, run, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace cue

extern "C" {
// `cue::parallel` with C linkage.
void cue_parallel(int tasks, void (*run)(void* context, int task), void* context);
// Number of computing threads, including the caller's. Initially the number of processors that this process may use.
int cue_threads();
// Set the number of threads, at least 1. Waits for work in progress.
void cue_set_threads(int count);
}
