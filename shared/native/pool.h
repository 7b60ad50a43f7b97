/* A pool of threads that share the units of a job's phases.
 *
 * Owns the threads, how they wait (spin for a moment, then sleep) and the order of phases. Must not
 * know what a unit is. Which thread takes which unit is left to chance: a unit's result must not
 * depend on it.
 */
#pragma once

#include <stdint.h>

enum { PHASES_MAX = 3, THREADS_MAX = 1024 };

typedef struct k3_pool k3_pool;

typedef struct {
    void (*unit)(void *context, int phase, int64_t index);
    void *context;
    int phases;
    int64_t units[PHASES_MAX]; /* a phase starts when all units of the one before have ended */
} k3_job;

/* Threads - 1 workers, for the caller of a job is the first thread; worker i runs on cpus[i % n_cpus]
 * only, on any CPU when n_cpus is 0. An idle worker looks for work for spin_ns before it sleeps.
 * NULL when threads is outside 1 .. THREADS_MAX, a CPU cannot be had or there is no memory. */
k3_pool *k3_pool_open(int32_t threads, const int32_t *cpus, int32_t n_cpus, int64_t spin_ns);

/* Ends the workers; nothing may be running. After a fork the child has none and only frees. */
void k3_pool_close(k3_pool *pool);

/* Nanoseconds of processor time spent on jobs so far, by all threads together. */
int64_t k3_pool_cpu_ns(const k3_pool *pool);

/* Runs every unit of every phase once. A caller without a pool runs all of them itself, and so does
 * one that finds the pool at work for another thread, or made by another process: a fork copies the
 * memory and none of the workers. */
void k3_pool_run(k3_pool *pool, const k3_job *job);
