/* Dot products of packed rows, for inclusion by a back end that has defined for its registers:
 *
 *  PARTS, vec          16 lanes of float are PARTS registers of type vec
 *  TOKENS_MAX          tokens that share one decoding of a weight: 4, or 8, then 2 rows at once
 *  ROWS_1, _2, _4      interleaved rows that 1, 2, and 3 or 4 tokens take at once
 *  weights             the decoded weights of one part of a chunk
 *  decode(codes, part)                weights
 *  lane_scales(scales, part)          vec: the block scale of every lane, times 2^-8
 *  load_packed(values, part)          packed: one part of a chunk of an input
 *  accumulate(weights, scale, packed, x_scale, acc)
 *                                     vec: acc with every lane's 8 products added
 *  sum_lanes(parts)                   float: by the tree i + (i + 8), i + (i + 4), (0 + 2) + (1 + 3)
 *  FINAL                              factor of a sum
 *
 * Lane i of a row sums columns 8i to 8i + 7 of every chunk, in the order of the chunks. How many rows
 * and tokens share a pass decides how often a weight is decoded, never the order of a sum.
 */
#include "pieces.h"

enum { ROWS_MAX = 4 };

/* Not zero in a high bit when one of 8 scales is NaN (0x7f) or has a sign; a record like that is
 * damaged, and its row must be refused. */
INLINE uint64_t scale_faults(const uint8_t *scales) {
    uint64_t codes;
    memcpy(&codes, scales, sizeof codes);
    return ((codes & 0x7f7f7f7f7f7f7f7f) + 0x0101010101010101) | codes;
}

/* Where rows lie: bytes of codes between neighbours and between the chunks of one row. Scales lie in
 * the same way at an eighth of the distance. */
typedef struct {
    int64_t row, chunk;
} distance;

/* One chunk of some rows against some tokens; counts are constant at every call. */
INLINE void dot_chunk(const uint8_t *codes, const uint8_t *scales, const int64_t row_bytes,
                      const k3_input *inputs, int64_t chunk, const int rows, const int tokens,
                      vec acc[ROWS_MAX][TOKENS_MAX][PARTS], uint64_t faults[ROWS_MAX]) {
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
        __builtin_prefetch((const void *)((uintptr_t)codes + r * row_bytes + PREFETCH_BYTES));
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
        weights w[ROWS_MAX];
        vec scale[ROWS_MAX];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            w[r] = decode(codes + r * row_bytes, part);
            scale[r] = lane_scales(scales + r * row_bytes / 8, part);
        }
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const packed x = load_packed(inputs[t].values + chunk * INPUT_CHUNK_BYTES, part);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++)
                acc[r][t][part] =
                    accumulate(w[r], scale[r], x, inputs[t].scales[chunk], acc[r][t][part]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        faults[r] |= scale_faults(scales + r * row_bytes / 8);
    }
}

/* sums[t * stride + r] of `rows` neighbours. */
INLINE void dot_rows(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                     const distance apart, const k3_input *inputs, const int rows,
                     const int tokens, float *sums, int64_t stride) {
    vec acc[ROWS_MAX][TOKENS_MAX][PARTS] = {0};
    uint64_t faults[ROWS_MAX] = {0};
    k3_input near[TOKENS_MAX]; /* copied, so that the pointers stay in registers */
    for (int t = 0; t < tokens; t++)
        near[t] = inputs[t];
    const int64_t whole = columns / CHUNK;
    for (int64_t chunk = 0; chunk < whole; chunk++)
        dot_chunk(codes + chunk * apart.chunk, scales + chunk * apart.chunk / 8, apart.row, near,
                  chunk, rows, tokens, acc, faults);
    if (apart.chunk == CHUNK_BYTES && columns % CHUNK) { /* a row ends inside a chunk: zeros there */
        uint8_t last_codes[ROWS_MAX * CHUNK_BYTES] = {0}, last_scales[ROWS_MAX * CHUNK_SCALES] = {0};
        for (int r = 0; r < rows; r++) {
            memcpy(last_codes + r * CHUNK_BYTES, codes + r * apart.row + whole * CHUNK_BYTES,
                   (size_t)(columns % CHUNK) / 2);
            memcpy(last_scales + r * CHUNK_SCALES,
                   scales + r * apart.row / 8 + whole * CHUNK_SCALES,
                   (size_t)(columns % CHUNK) / 16);
        }
        dot_chunk(last_codes, last_scales, CHUNK_BYTES, near, whole, rows, tokens, acc, faults);
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        const int refused = (faults[r] & 0x8080808080808080) != 0;
#pragma GCC unroll 8
        for (int t = 0; t < tokens; t++) {
            const float sum = sum_lanes(acc[r][t]) * FINAL;
            sums[t * stride + r] = refused ? as_float(NAN_BITS) : nan_unless_finite(sum);
        }
    }
}

/* 4 rows, `rows` of them in a pass. */
INLINE void dot_pass(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                     const distance apart, const k3_input *inputs, const int rows,
                     const int tokens, float *sums, int64_t stride) {
    for (int r = 0; r < ROWS_MAX; r += rows)
        dot_rows(codes + r * apart.row, scales + r * apart.row / 8, columns, apart, inputs, rows,
                 tokens, sums + r, stride);
}

/* 4 rows against 1 to TOKENS_MAX tokens; at_1, at_2 and at_4 rows in a pass. */
INLINE void dot_tokens(const uint8_t *codes, const uint8_t *scales, int64_t columns,
                       const distance apart, const int at_1, const int at_2, const int at_4,
                       const k3_input *inputs, int64_t tokens, float *sums, int64_t stride) {
#define TAKE(n, rows)                                                                              \
    case n: dot_pass(codes, scales, columns, apart, inputs, rows, n, sums, stride); break
    switch (tokens) {
        TAKE(1, at_1);
        TAKE(2, at_2);
        TAKE(3, at_4);
        TAKE(4, at_4);
#if TOKENS_MAX == 8
        TAKE(5, 2);
        TAKE(6, 2);
        TAKE(7, 2);
        TAKE(8, 2);
#endif
    }
#undef TAKE
}

/* See k3_backend.dots. Tokens are taken in equal shares, inside the loop over rows: the packed bytes
 * of a few rows stay in the nearest cache. With few tokens memory is the limit, and then a row of a
 * row-major record is taken alone: it is one stream, four together would be four at half the speed. */
static void dots(const k3_matrix *m, int64_t first, int64_t n, const k3_input *inputs,
                 int64_t tokens, float *sums, int64_t stride) {
    const int64_t row_bytes = m->columns / 2;
    for (int64_t row = 0; row < n; row += ROWS_MAX) {
        const uint8_t *codes = m->weight + (first + row) * row_bytes;
        const uint8_t *scales = m->scale + (first + row) * row_bytes / 8;
        int64_t shares = (tokens + TOKENS_MAX - 1) / TOKENS_MAX;
        for (int64_t t = 0, taken; t < tokens; t += taken, shares--) {
            taken = (tokens - t + shares - 1) / shares;
            float *to = sums + t * stride + row;
            if (m->interleaved)
                dot_tokens(codes, scales, m->columns, (distance){CHUNK_BYTES, 4 * CHUNK_BYTES},
                           ROWS_1, ROWS_2, ROWS_4, inputs + t, taken, to, stride);
            else
                dot_tokens(codes, scales, m->columns, (distance){row_bytes, CHUNK_BYTES}, 1, 1, 1,
                           inputs + t, taken, to, stride);
        }
    }
}
