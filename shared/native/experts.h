/* The CPU expert kernel: rows of NVFP4 experts, read in place from a bank's arena.
 *
 * Owns the arithmetic of one row (definition: shared/kernels/expert.py) and the order in which the
 * pairs of a call are computed. Knows the arena only as base + row * stride. The caller has checked
 * that the buffers are as large as their sizes say; ids and tokens are checked here, before any read.
 */
#pragma once

#include <stdint.h>

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

/* out[p] = expert(arena[bank_rows[p]], activations[tokens[p]]) for every pair p; bank row -1 gives a
 * row of zeros. Activations and rows are bf16 bits, [n_tokens, latent] and [pairs, latent].
 * Returns 0, or without having written anything: 1 + p when bank_rows[p] is outside [-1, n_rows),
 * -(1 + p) when tokens[p] is outside [0, n_tokens), INT64_MIN when there is no memory. */
int64_t k3_expert_rows(const k3_expert_layout *layout, const uint8_t *arena, int64_t n_rows,
                       const int32_t *bank_rows, const int32_t *tokens, int64_t pairs,
                       const uint16_t *activations, int64_t n_tokens, uint16_t *out);

/* h[i] = SiTU(g[i], u[i]) before its rounding to bf16; n is a multiple of 16. For the tests of its
 * error bound. */
void k3_situ(const float *g, const float *u, float *h, int64_t n);
