// One pool of threads for all kernels: the caller and `cue_threads() - 1` workers.
#pragma once

#include <type_traits>

namespace cue {

// Run `run(context, task)` for every task from 0 to `tasks - 1`, in any order, on all threads; returns when all are
// done. Callers take turns. A task must not throw; a task that calls `parallel` does that work alone.
void parallel(int tasks, void (*run)(void* context, int task), void* context);

// The same for a lambda `void(int task)`.
template <class Body>
void parallel(int tasks, Body&& body) {
    using Callable = std::remove_reference_t<Body>;
    auto run = [](void* context, int task) { (*static_cast<Callable*>(context))(task); };
    parallel(tasks, run, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace cue

extern "C" {
// `cue::parallel` for callers from elsewhere.
void cue_parallel(int tasks, void (*run)(void* context, int task), void* context);
// How many threads compute, the caller among them; at first as many as this process may use processors.
int cue_threads();
// Change it, to 1 at least. Waits for work in progress.
void cue_set_threads(int count);
}
