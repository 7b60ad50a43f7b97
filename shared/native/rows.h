/* Rows of NVFP4 experts by the fastest loops this machine has, on as many threads as asked for.
 *
 * Owns what every back end has in common: the checks of ids, grouping pairs by expert, scratch memory
 * and how a call is cut into units. The arithmetic is the back ends' (dots.h, pieces.h); threads are
 * the pool's. The caller has checked that the buffers are as large as their sizes say.
 */
#pragma once

#include <stdint.h>

#include "pool.h"

/* Where the nine tensors of an expert that matter lie inside a record; index 0 w1, 1 w3, 2 w2. */
typedef struct {
    int64_t latent; /* both multiples of 16, of 128 in an interleaved record */
    int64_t width;
    int64_t interleaved; /* 0: row-major; 1: rows interleaved by 4 (shared/core/record.py) */
    int64_t stride_bytes;
    int64_t weight[3];
    int64_t scale[3];
    int64_t scale_2[3];
} k3_expert_layout;

/* Back ends, best first; those of one kernel give the same bits. NULL beyond the last one. */
const char *k3_backend_kernel(int32_t backend);
const char *k3_backend_isa(int32_t backend);
/* Whether this processor has the instructions of a back end. */
int32_t k3_backend_usable(int32_t backend);

/* Row p = expert(arena[bank_rows[p]], activations[tokens[p]]) for every pair p, by back end `backend`
 * and the threads of `pool` (NULL: this thread alone); bank row -1 gives a row of zeros. Activations
 * are bf16 bits [n_tokens, latent]. Rows [pairs, latent] are bf16 bits in out, or float32 in out_f32,
 * not rounded; the other one is NULL.
 * Returns 0, or without having written anything: 1 + p when bank_rows[p] is outside [-1, n_rows),
 * -(1 + p) when tokens[p] is outside [0, n_tokens), INT64_MIN when there is no memory,
 * INT64_MIN + 1 when the rows lie over something that is read. */
int64_t k3_rows(int32_t backend, k3_pool *pool, const k3_expert_layout *layout,
                const uint8_t *arena, int64_t n_rows, const int32_t *bank_rows,
                const int32_t *tokens, int64_t pairs, const uint16_t *activations,
                int64_t n_tokens, uint16_t *out, float *out_f32);

/* Reads `bytes` bytes once with the threads of `pool`: the limit that memory sets to a kernel. The
 * value keeps the loads from being left out. */
uint64_t k3_read_probe(k3_pool *pool, const uint8_t *memory, int64_t bytes);

/* h[i] = SiTU(g[i], u[i]) by a back end; n is a multiple of 16. For the tests of its error bound. */
void k3_backend_situ(int32_t backend, const float *g, const float *u, float *h, int64_t n);
