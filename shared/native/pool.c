/* See pool.h. Units are claimed by counting up, and a phase has ended when as many units have ended as
 * it has: nobody waits for a worker that has not woken up yet, only for one that holds a unit. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

enum { PHASE_SPIN_NS = 20000, LOOKS_PER_CLOCK = 64 };

/* A job at work. It lies on the caller's stack: `inside` keeps the caller there until the last worker
 * has let go of it. */
typedef struct {
    const k3_job *job;
    int64_t claimed[PHASES_MAX];
    int64_t ended[PHASES_MAX];
} progress;

struct k3_pool {
    pthread_mutex_t busy; /* held by the caller whose job runs */
    pthread_mutex_t lock; /* guards everything below, except what is marked atomic */
    pthread_cond_t work;  /* a job has come, or the end */
    pthread_cond_t phase; /* a phase has ended, or a worker has left */
    progress *now;        /* NULL between jobs */
    uint64_t jobs;        /* atomic; counts the jobs that have come */
    int inside;           /* workers that may touch *now */
    int stopping;         /* atomic */
    int64_t cpu_ns;       /* atomic */
    int64_t spin_ns;
    pid_t maker;
    int32_t workers;
    pthread_t thread[];
};

static int64_t clock_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

static int phase_ended(const progress *p, int phase) {
    return __atomic_load_n(&p->ended[phase], __ATOMIC_ACQUIRE) == p->job->units[phase];
}

static void wait_for_phase(k3_pool *pool, const progress *p, int phase) {
    const int64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    while (clock_ns(CLOCK_MONOTONIC) - start_ns < PHASE_SPIN_NS)
        for (int i = 0; i < LOOKS_PER_CLOCK; i++) {
            if (phase_ended(p, phase))
                return;
            relax();
        }
    pthread_mutex_lock(&pool->lock);
    while (!phase_ended(p, phase))
        pthread_cond_wait(&pool->phase, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

/* The part of one thread in a job; on return every phase has ended. */
static void take_part(k3_pool *pool, progress *p) {
    const int64_t start_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    const k3_job *job = p->job;
    for (int phase = 0; phase < job->phases; phase++) {
        for (;;) {
            const int64_t unit = __atomic_fetch_add(&p->claimed[phase], 1, __ATOMIC_RELAXED);
            if (unit >= job->units[phase])
                break;
            job->unit(job->context, phase, unit);
            if (__atomic_add_fetch(&p->ended[phase], 1, __ATOMIC_ACQ_REL) == job->units[phase]) {
                pthread_mutex_lock(&pool->lock); /* a sleeper has looked before, or is asleep */
                pthread_cond_broadcast(&pool->phase);
                pthread_mutex_unlock(&pool->lock);
            }
        }
        if (!phase_ended(p, phase))
            wait_for_phase(pool, p, phase);
    }
    const int64_t spent_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID) - start_ns;
    __atomic_fetch_add(&pool->cpu_ns, spent_ns, __ATOMIC_RELAXED);
}

static void spin_for_job(const k3_pool *pool, uint64_t seen) {
    const int64_t start_ns = clock_ns(CLOCK_MONOTONIC);
    while (clock_ns(CLOCK_MONOTONIC) - start_ns < pool->spin_ns)
        for (int i = 0; i < LOOKS_PER_CLOCK; i++) {
            if (__atomic_load_n(&pool->jobs, __ATOMIC_ACQUIRE) != seen ||
                __atomic_load_n(&pool->stopping, __ATOMIC_ACQUIRE))
                return;
            relax();
        }
}

static void *worker(void *argument) {
    k3_pool *pool = argument;
    uint64_t seen = 0;
    pthread_setname_np(pthread_self(), "k3-kernel");
    for (;;) {
        if (pool->spin_ns > 0)
            spin_for_job(pool, seen);
        pthread_mutex_lock(&pool->lock);
        while (!pool->stopping && (!pool->now || pool->jobs == seen))
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stopping) {
            pthread_mutex_unlock(&pool->lock);
            return NULL;
        }
        progress *p = pool->now;
        seen = pool->jobs;
        pool->inside++;
        pthread_mutex_unlock(&pool->lock);

        take_part(pool, p);

        pthread_mutex_lock(&pool->lock);
        pool->inside--;
        pthread_cond_broadcast(&pool->phase);
        pthread_mutex_unlock(&pool->lock);
    }
}

static int is_ours(const k3_pool *pool) { return pool->maker == getpid(); }

static int start_worker(k3_pool *pool, int32_t cpu) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes))
        return -1;
    int failed = 0;
    if (cpu >= 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        if (cpu < CPU_SETSIZE)
            CPU_SET(cpu, &set);
        failed = pthread_attr_setaffinity_np(&attributes, sizeof set, &set);
    }
    failed = failed || pthread_create(&pool->thread[pool->workers], &attributes, worker, pool);
    pthread_attr_destroy(&attributes);
    if (failed)
        return -1;
    pool->workers++;
    return 0;
}

k3_pool *k3_pool_open(int32_t threads, const int32_t *cpus, int32_t n_cpus, int64_t spin_ns) {
    if (threads < 1 || threads > THREADS_MAX)
        return NULL;
    for (int32_t i = 0; i < n_cpus; i++)
        if (cpus[i] < 0)
            return NULL;
    k3_pool *pool = calloc(1, sizeof *pool + (size_t)threads * sizeof pool->thread[0]);
    if (!pool)
        return NULL;
    pthread_mutex_init(&pool->busy, NULL);
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->phase, NULL);
    pool->spin_ns = spin_ns;
    pool->maker = getpid();

    sigset_t all, before; /* signals belong to the program's own threads */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = 0;
    for (int32_t i = 0; i < threads - 1 && !failed; i++)
        failed = start_worker(pool, n_cpus ? cpus[i % n_cpus] : -1);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        k3_pool_close(pool);
        return NULL;
    }
    return pool;
}

void k3_pool_close(k3_pool *pool) {
    if (!pool)
        return;
    if (is_ours(pool)) {
        pthread_mutex_lock(&pool->lock);
        __atomic_store_n(&pool->stopping, 1, __ATOMIC_RELEASE);
        pthread_cond_broadcast(&pool->work);
        pthread_mutex_unlock(&pool->lock);
        for (int32_t i = 0; i < pool->workers; i++)
            pthread_join(pool->thread[i], NULL);
        pthread_cond_destroy(&pool->work);
        pthread_cond_destroy(&pool->phase);
        pthread_mutex_destroy(&pool->lock);
        pthread_mutex_destroy(&pool->busy);
    }
    free(pool);
}

int64_t k3_pool_cpu_ns(const k3_pool *pool) {
    return __atomic_load_n(&pool->cpu_ns, __ATOMIC_RELAXED);
}

static void run_alone(const k3_job *job) {
    for (int phase = 0; phase < job->phases; phase++)
        for (int64_t unit = 0; unit < job->units[phase]; unit++)
            job->unit(job->context, phase, unit);
}

void k3_pool_run(k3_pool *pool, const k3_job *job) {
    if (!pool || !is_ours(pool) || pthread_mutex_trylock(&pool->busy)) {
        run_alone(job);
        return;
    }
    progress p = {.job = job};
    pthread_mutex_lock(&pool->lock);
    pool->now = &p;
    __atomic_fetch_add(&pool->jobs, 1, __ATOMIC_RELEASE);
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);

    take_part(pool, &p);

    pthread_mutex_lock(&pool->lock);
    pool->now = NULL; /* a worker that wakes up only now finds nothing */
    while (pool->inside > 0)
        pthread_cond_wait(&pool->phase, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
    pthread_mutex_unlock(&pool->busy);
}
