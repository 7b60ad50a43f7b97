/* Bells: 64-bit words in shared memory that one side stores and the other side waits for.
 *
 * Owns the wait (spin, then sleep on a futex) and the ring. Knows no slot, epoch or ticket: what a
 * value means is the caller's affair, and a bell is a wake-up, never a proof.
 *
 * The wake word is a pair of adjacent u32: wake[0] counts rings, wake[1] counts sleepers. All words
 * may be shared between processes. A process that dies asleep leaves wake[1] too high: later rings
 * then make a system call for nobody, which costs time and loses nothing.
 */
#pragma once

#include <stdint.h>

/* Waits until every bell of one group has the wanted state and returns that group (the lowest one).
 *
 * mode 0: bells[i] == expected[i]; mode 1: bells[i] != expected[i]. group[i] is in [0, groups),
 * groups <= 64; a group without bells is never complete, so n = 0 sleeps until the interrupt or the
 * timeout. Spins for spin_ns, then sleeps until a ring, both within timeout_ns (<= 0: look once).
 * Returns -1 after the timeout, -2 when *interrupt != interrupt_seen (interrupt may be NULL), -3
 * when an argument is out of range. A complete group wins over the interrupt.
 */
int k3_wait(uint64_t *const *bells, const uint64_t *expected, const int32_t *group, int32_t n,
            int32_t groups, int32_t mode, uint32_t *wake, uint32_t *interrupt,
            uint32_t interrupt_seen, int64_t spin_ns, int64_t timeout_ns);

/* Stores value into bell (release) and wakes every sleeper of wake. bell or wake may be NULL. */
void k3_ring(uint64_t *bell, uint64_t value, uint32_t *wake);

/* Makes every k3_wait that watches this interrupt word return -2. */
void k3_interrupt(uint32_t *interrupt, uint32_t *wake);
