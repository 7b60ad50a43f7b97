/* See bell.h. */
#include "bell.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { GROUPS_MAX = 64, LOOKS_PER_CLOCK = 32 };
enum { TIMED_OUT = -1, INTERRUPTED = -2, BAD_ARGUMENT = -3 };

typedef struct {
    uint64_t *const *bells;
    const uint64_t *expected;
    const int32_t *group;
    int32_t n;
    int32_t mode;
    uint64_t present; /* groups that have a bell at all */
    const uint32_t *interrupt;
    uint32_t interrupt_seen;
} watch;

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* One look at everything watched: a group, INTERRUPTED, or TIMED_OUT for "nothing yet". */
static int look(const watch *w) {
    uint64_t waiting = 0;
    for (int32_t i = 0; i < w->n; i++) {
        uint64_t value = __atomic_load_n(w->bells[i], __ATOMIC_ACQUIRE);
        uint64_t unmet = (value == w->expected[i]) == (w->mode != 0);
        waiting |= unmet << w->group[i];
    }
    uint64_t complete = w->present & ~waiting;
    if (complete)
        return __builtin_ctzll(complete);
    if (w->interrupt && __atomic_load_n(w->interrupt, __ATOMIC_ACQUIRE) != w->interrupt_seen)
        return INTERRUPTED;
    return TIMED_OUT;
}

static int spin(const watch *w, int64_t until_ns) {
    for (;;) {
        for (int i = 0; i < LOOKS_PER_CLOCK; i++) {
            int found = look(w);
            if (found != TIMED_OUT)
                return found;
            relax();
        }
        if (now_ns() >= until_ns)
            return TIMED_OUT;
    }
}

/* No ring is lost: the ringer stores the bell, adds to wake[0], then reads wake[1]. Either its add
 * comes before the kernel compares wake[0] with `seen`, and the futex call returns at once, or it
 * comes after, and then wake[1] already counts us and the ringer wakes us. */
static void sleep_once(uint32_t *wake, uint32_t seen, int64_t left_ns) {
    struct timespec left = {.tv_sec = left_ns / 1000000000, .tv_nsec = left_ns % 1000000000};
    __atomic_fetch_add(&wake[1], 1, __ATOMIC_SEQ_CST);
    syscall(SYS_futex, wake, FUTEX_WAIT, seen, &left, NULL, 0);
    __atomic_fetch_sub(&wake[1], 1, __ATOMIC_SEQ_CST);
}

int k3_wait(uint64_t *const *bells, const uint64_t *expected, const int32_t *group, int32_t n,
            int32_t groups, int32_t mode, uint32_t *wake, uint32_t *interrupt,
            uint32_t interrupt_seen, int64_t spin_ns, int64_t timeout_ns) {
    if (n < 0 || groups < 0 || groups > GROUPS_MAX || (mode != 0 && mode != 1) || !wake)
        return BAD_ARGUMENT;
    watch w = {bells, expected, group, n, mode, 0, interrupt, interrupt_seen};
    for (int32_t i = 0; i < n; i++) {
        if (group[i] < 0 || group[i] >= groups)
            return BAD_ARGUMENT;
        w.present |= (uint64_t)1 << group[i];
    }

    int found = look(&w);
    if (found != TIMED_OUT || timeout_ns <= 0)
        return found;
    const int64_t start_ns = now_ns();
    if (spin_ns > 0) {
        found = spin(&w, start_ns + (spin_ns < timeout_ns ? spin_ns : timeout_ns));
        if (found != TIMED_OUT)
            return found;
    }
    for (;;) {
        uint32_t seen = __atomic_load_n(&wake[0], __ATOMIC_SEQ_CST);
        found = look(&w); /* after reading wake[0]: a ring from here on changes it */
        if (found != TIMED_OUT)
            return found;
        int64_t left_ns = timeout_ns - (now_ns() - start_ns);
        if (left_ns <= 0)
            return TIMED_OUT;
        sleep_once(wake, seen, left_ns);
    }
}

void k3_ring(uint64_t *bell, uint64_t value, uint32_t *wake) {
    if (bell)
        __atomic_store_n(bell, value, __ATOMIC_RELEASE);
    if (!wake)
        return;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    __atomic_fetch_add(&wake[0], 1, __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&wake[1], __ATOMIC_SEQ_CST) != 0)
        syscall(SYS_futex, wake, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}

void k3_interrupt(uint32_t *interrupt, uint32_t *wake) {
    __atomic_fetch_add(interrupt, 1, __ATOMIC_SEQ_CST);
    k3_ring(NULL, 0, wake);
}
