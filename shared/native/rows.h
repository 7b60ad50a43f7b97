/* Rows of NVFP4 experts by the fastest loops this machine has, on as many threads as asked for.
 *
 * Owns what every back end has in common: the checks of ids, grouping pairs by expert, scratch memory
 * and how a call is cut into units. The arithmetic is the back ends' (dots.h, pieces.h); threads are
 * the pool's. The caller has checked that the buffers are as large as their sizes say.
 */
#pragma once

#include <stdint.h>

#include "experts.h"
#include "pool.h"

/* Back ends, best first; those of one kernel give the same bits. NULL beyond the last one. */
const char *k3_backend_kernel(int32_t backend);
const char *k3_backend_isa(int32_t backend);
/* Whether this processor has the instructions of a back end. */
int32_t k3_backend_usable(int32_t backend);

/* As k3_expert_rows, by back end `backend` and the threads of `pool` (NULL: this thread alone). Rows
 * are bf16 bits in out, or float32 in out_f32, not rounded; the other one is NULL. */
int64_t k3_rows(int32_t backend, k3_pool *pool, const k3_expert_layout *layout,
                const uint8_t *arena, int64_t n_rows, const int32_t *bank_rows,
                const int32_t *tokens, int64_t pairs, const uint16_t *activations,
                int64_t n_tokens, uint16_t *out, float *out_f32);

/* Reads `bytes` bytes once with the threads of `pool`: the limit that memory sets to a kernel. The
 * value keeps the loads from being left out. */
uint64_t k3_read_probe(k3_pool *pool, const uint8_t *memory, int64_t bytes);

/* h[i] = SiTU(g[i], u[i]) by a back end; n is a multiple of 16. For the tests of its error bound. */
void k3_backend_situ(int32_t backend, const float *g, const float *u, float *h, int64_t n);
