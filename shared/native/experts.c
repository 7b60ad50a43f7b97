/* See experts.h. Written with GCC vector types; everything is defined for 16 lanes and gives the
 * same bits on any machine:
 *  - a weight is E2M1 x E4M3 (6 significant bits) and an input is bf16 (8), so every product is exact
 *    (inputs below 2^-120 aside) and a fused multiply-add equals a separate one;
 *  - the columns of a row are dealt to 16 accumulators in a fixed way (see deal_column), summed
 *    in column order within a lane and by a fixed tree at the end, whatever the number of tokens;
 *  - the activation function uses multiplication, addition and division only.
 */
#include "experts.h"

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <stdlib.h>
#include <string.h>

typedef float f32x16 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));
typedef float f32x4 __attribute__((vector_size(16)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,
    CHUNK = 128,              /* columns decoded at a time: 16 words of 8 nibbles */
    CHUNK_BYTES = CHUNK / 2,
    CHUNK_SCALES = CHUNK / 16,
    TILE = 32,                /* tokens of one expert whose inputs are unpacked at a time */
    TOKENS_MAX = 4,           /* tokens that share one decoding of a weight */
    PREFETCH_BYTES = 4096,    /* ahead of the weights in work: 6.1 -> 9.2 GB/s out of memory */
};

/* ---- small pieces ---- */

INLINE f32x16 load16(const float *p) {
    f32x16 v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* a * b + c. The product is exact here, so fused or not gives the same bits; fusing is asked for by
 * name because the flags forbid the compiler to do it where it would change them. */
INLINE f32x16 multiply_add(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}

INLINE f32x16 select16(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)((mask & (i32x16)yes) | (~mask & (i32x16)no));
}

INLINE float sum16(f32x16 v) {
    f32x8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    f32x4 b = __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* bf16 bits of a float: nearest even; every NaN becomes the same one, because which NaN an operation
 * passes on is the compiler's choice. */
INLINE u32x16 bf16_round(f32x16 v) {
    u32x16 bits = (u32x16)v;
    u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    u32x16 is_nan = (u32x16)(v != v);
    return (is_nan & 0x7fc0) | (~is_nan & rounded);
}

INLINE float f32_at(const uint8_t *p) {
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

INLINE int64_t padded(int64_t columns) { return (columns + CHUNK - 1) / CHUNK * CHUNK; }

/* A pair in work is one key, its bank row above its index, so that sorting groups by expert. */
INLINE int64_t pair_of(uint64_t key) { return (int64_t)(key & UINT32_MAX); }

/* Place of column j in an unpacked input. Lane i takes columns 8i..8i+7 of its chunk, because those
 * are the nibbles of the i-th 32-bit word of the packed weights; nibble k of all lanes lie together. */
INLINE int64_t deal_column(int64_t j) {
    return j / CHUNK * CHUNK + j % 8 * LANES + j % CHUNK / 8;
}

/* ---- SiTU ---- */

/* exp(x) = scale * (1 + tail), |tail| < 0.42. For |x| <= 87; a NaN gives a NaN tail. */
INLINE f32x16 exp_parts(f32x16 x, f32x16 *tail) {
    const f32x16 magic = (f32x16){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    f32x16 shifted = x * 1.44269504f + magic;
    f32x16 n = shifted - magic;
    f32x16 r = x - n * 0.693359375f; /* ln 2 in two parts, the first one exact in 9 bits */
    r = r - n * -2.12194440e-4f;
    f32x16 p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    *tail = p * (r * r) + r;
    return (f32x16)(((u32x16)shifted << 23) + 0x3f800000);
}

INLINE f32x16 tanh16(f32x16 x) {
    const i32x16 sign = (i32x16)x & INT32_MIN;
    f32x16 a = (f32x16)((i32x16)x & INT32_MAX);
    a = select16(a > 10.0f, (f32x16){0} + 10.0f, a); /* tanh(10) is 1 in f32 */
    f32x16 tail;
    f32x16 scale = exp_parts(a + a, &tail);
    f32x16 expm1 = scale * tail + (scale - 1.0f);
    return (f32x16)((i32x16)(expm1 / (expm1 + 2.0f)) | sign);
}

/* 1 / (1 + exp(-x)); never below exp(-87), the smallest exponential that is a normal number. */
INLINE f32x16 sigmoid16(f32x16 x) {
    f32x16 a = -x;
    a = select16(a > 87.0f, (f32x16){0} + 87.0f, a);
    a = select16(a < -87.0f, (f32x16){0} - 87.0f, a);
    f32x16 tail;
    f32x16 scale = exp_parts(a, &tail);
    return 1.0f / (1.0f + (scale + scale * tail));
}

/* 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25): K3's activation, beta 4 and linear beta 25. */
INLINE f32x16 situ16(f32x16 g, f32x16 u) {
    return (4.0f * tanh16(g * 0.25f) * sigmoid16(g)) * (25.0f * tanh16(u / 25.0f));
}

void k3_situ(const float *g, const float *u, float *h, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) {
        f32x16 v = situ16(load16(g + i), load16(u + i));
        memcpy(h + i, &v, sizeof v);
    }
}

/* ---- dot products of packed rows ---- */

/* E4M3 bytes to floats. Arithmetic that never makes a subnormal float: those cost 100 cycles each. */
static void unpack_scales(const uint8_t *restrict codes, int64_t n, float *restrict scales) {
    for (int64_t i = 0; i < n; i++) {
        uint32_t code = codes[i];
        uint32_t is_subnormal = (code & 0x78) == 0; /* value m/8 * 2^-6 = (1 + m/8) * 2^-6 - 2^-6 */
        uint32_t is_nan = (code & 0x7f) == 0x7f;
        uint32_t bits = (((code & 0x7f) | is_subnormal << 3) << 20) + (120u << 23);
        bits |= is_nan ? 0x7fc00000 : 0;
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        magnitude -= is_subnormal ? 0x1p-6f : 0.0f;
        scales[i] = code & 0x80 ? -magnitude : magnitude;
    }
}

typedef struct {
    const uint8_t *weight; /* packed bytes of one row */
    const float *scale;    /* its unpacked block scales */
} packed_row;

/* Weights k, 8 + k, 16 + k ... of a chunk, block scale applied. */
INLINE f32x16 decode(u32x16 words, int k, f32x16 scale) {
#if defined(__AVX512F__)
    const f32x16 e2m1 = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return __builtin_shuffle(e2m1, (i32x16)(words >> (4 * k))) * scale; /* takes 4 bits of an index */
#else
    /* twice the value as an integer, 0 1 2 3 4 6 8 12: (2 + m) << (e - 1), or m where e is 0 */
    u32x16 code = words >> (4 * k);
    u32x16 normal = (u32x16)((code & 6) != 0);
    u32x16 twice = ((code & 1) | (normal & 2)) << (((code >> 1) & 3) + normal);
    f32x16 v = __builtin_convertvector((i32x16)twice, f32x16) * 0.5f;
    return (f32x16)((u32x16)v | ((code & 8) << 28)) * scale;
#endif
}

/* The packed words of one chunk, zeros where the row ends; reads no byte beyond the row. */
INLINE u32x16 packed_chunk(packed_row row, int64_t first, int64_t columns) {
    const uint8_t *from = row.weight + first / 2;
    __builtin_prefetch((const void *)((uintptr_t)from + PREFETCH_BYTES));
    uint8_t tail[CHUNK_BYTES];
    if (__builtin_expect(columns - first < CHUNK, 0)) {
        memset(tail, 0, sizeof tail);
        memcpy(tail, from, (size_t)(columns - first) / 2);
        from = tail;
    }
    u32x16 words;
    memcpy(&words, from, sizeof words);
    return words;
}

/* Block scales of one chunk, by lane: 16 columns share one scale, a lane has 8; zeros at the end. */
INLINE f32x16 chunk_scale(packed_row row, int64_t first, int64_t columns) {
    f32x8 s = {0};
    if (__builtin_expect(columns - first < CHUNK, 0))
        memcpy(&s, row.scale + first / 16, (size_t)(columns - first) / 16 * sizeof(float));
    else
        memcpy(&s, row.scale + first / 16, sizeof s);
    return __builtin_shufflevector(s, s, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
}

/* Two rows (a, b) against a few tokens: sum_a[t * step] and sum_b[t * step]. `tokens` is a constant at
 * every call, so that the accumulators stay in registers. */
INLINE void dot_block(packed_row a, packed_row b, int64_t columns, const float *x, int64_t x_stride,
                      const int tokens, float *sum_a, float *sum_b, int64_t step) {
    f32x16 acc_a[TOKENS_MAX] = {{0}}, acc_b[TOKENS_MAX] = {{0}};
    for (int64_t first = 0; first < columns; first += CHUNK) {
        const u32x16 words_a = packed_chunk(a, first, columns);
        const u32x16 words_b = packed_chunk(b, first, columns);
        const f32x16 scale_a = chunk_scale(a, first, columns);
        const f32x16 scale_b = chunk_scale(b, first, columns);
#pragma GCC unroll 8
        for (int k = 0; k < 8; k++) {
            const f32x16 weight_a = decode(words_a, k, scale_a);
            const f32x16 weight_b = decode(words_b, k, scale_b);
#pragma GCC unroll 4
            for (int t = 0; t < tokens; t++) {
                const f32x16 input = load16(x + t * x_stride + first + k * LANES);
                acc_a[t] = multiply_add(weight_a, input, acc_a[t]);
                acc_b[t] = multiply_add(weight_b, input, acc_b[t]);
            }
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        sum_a[t * step] = sum16(acc_a[t]);
        sum_b[t * step] = sum16(acc_b[t]);
    }
}

/* dot_block for 1 to TOKENS_MAX tokens. How many share a call decides how often a weight is decoded,
 * never the order in which a sum is taken. */
static void dot_rows(packed_row a, packed_row b, int64_t columns, const float *x, int64_t x_stride,
                     int64_t tokens, float *sum_a, float *sum_b, int64_t step) {
    switch (tokens) {
    case 1: dot_block(a, b, columns, x, x_stride, 1, sum_a, sum_b, step); break;
    case 2: dot_block(a, b, columns, x, x_stride, 2, sum_a, sum_b, step); break;
    case 3: dot_block(a, b, columns, x, x_stride, 3, sum_a, sum_b, step); break;
    case 4: dot_block(a, b, columns, x, x_stride, 4, sum_a, sum_b, step); break;
    }
}

/* ---- one expert ---- */

enum { W1, W3, W2 };

typedef struct {
    const k3_expert_layout *layout;
    const uint8_t *record;
    int64_t x_stride; /* floats between the rows of x and of h: columns up to whole chunks, the */
    int64_t h_stride; /* places of missing columns zero */
    float *x;         /* unpacked activations of a tile */
    float *h;         /* unpacked hidden rows of a tile */
    float *scale_a;   /* unpacked block scales of 16 rows of w1, later of w2 */
    float *scale_b;   /* the same of w3 */
} work;

/* Unpacks the block scales of 16 rows from `row` on; they lie together. */
static void open_rows(const work *w, int matrix, int64_t row, int64_t columns, float *scale) {
    const int64_t blocks = columns / 16;
    unpack_scales(w->record + w->layout->scale[matrix] + row * blocks, LANES * blocks, scale);
}

/* Row `row` of a matrix; `scale` holds the scales of the 16 rows it belongs to. */
INLINE packed_row one_row(const work *w, int matrix, int64_t row, int64_t columns,
                          const float *scale) {
    return (packed_row){w->record + w->layout->weight[matrix] + row * (columns / 2),
                        scale + row % LANES * (columns / 16)};
}

/* h = bf16(SiTU(W1 x, W3 x)), 16 elements of every token at a time. */
static void hidden_rows(const work *w, int64_t tokens) {
    const int64_t latent = w->layout->latent;
    const float scale_g = f32_at(w->record + w->layout->scale_2[W1]);
    const float scale_u = f32_at(w->record + w->layout->scale_2[W3]);
    float g[TILE][LANES], u[TILE][LANES];
    for (int64_t o = 0; o < w->layout->width; o += LANES) {
        open_rows(w, W1, o, latent, w->scale_a);
        open_rows(w, W3, o, latent, w->scale_b);
        for (int64_t t = 0; t < tokens; t += TOKENS_MAX) {
            const int64_t n = least(tokens - t, TOKENS_MAX);
            for (int64_t i = 0; i < LANES; i++) {
                packed_row gate = one_row(w, W1, o + i, latent, w->scale_a);
                packed_row up = one_row(w, W3, o + i, latent, w->scale_b);
                dot_rows(gate, up, latent, w->x + t * w->x_stride, w->x_stride, n, &g[t][i],
                         &u[t][i], LANES);
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            f32x16 act = situ16(load16(g[t]) * scale_g, load16(u[t]) * scale_u);
            f32x16 rounded = (f32x16)(bf16_round(act) << 16);
            for (int64_t i = 0; i < LANES; i++)
                w->h[t * w->h_stride + deal_column(o + i)] = rounded[i];
        }
    }
}

/* out[pair] = bf16(W2 h), for the pairs whose h are in the tile. */
static void output_rows(const work *w, int64_t tokens, const uint64_t *keys, uint16_t *out) {
    const int64_t width = w->layout->width, latent = w->layout->latent;
    const float scale_y = f32_at(w->record + w->layout->scale_2[W2]);
    float y[TILE][LANES];
    for (int64_t o = 0; o < latent; o += LANES) {
        open_rows(w, W2, o, width, w->scale_a);
        for (int64_t t = 0; t < tokens; t += TOKENS_MAX) {
            const int64_t n = least(tokens - t, TOKENS_MAX);
            for (int64_t i = 0; i < LANES; i += 2) {
                packed_row a = one_row(w, W2, o + i, width, w->scale_a);
                packed_row b = one_row(w, W2, o + i + 1, width, w->scale_a);
                dot_rows(a, b, width, w->h + t * w->h_stride, w->h_stride, n, &y[t][i],
                         &y[t][i + 1], LANES);
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            u32x16 bits = bf16_round(load16(y[t]) * scale_y);
            uint16_t *row = out + pair_of(keys[t]) * latent + o;
            for (int64_t i = 0; i < LANES; i++)
                row[i] = (uint16_t)bits[i];
        }
    }
}

static void unpack_activation(const uint16_t *bits, int64_t columns, float *x) {
    for (int64_t j = 0; j < columns; j++) {
        uint32_t word = (uint32_t)bits[j] << 16;
        memcpy(&x[deal_column(j)], &word, sizeof word);
    }
}

/* ---- a call ---- */

static int by_key(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int64_t first_out_of_range(int64_t n_rows, const int32_t *bank_rows, int64_t n_tokens,
                                  const int32_t *tokens, int64_t pairs) {
    for (int64_t p = 0; p < pairs; p++) {
        if (bank_rows[p] < -1 || bank_rows[p] >= n_rows)
            return 1 + p;
        if (tokens[p] < 0 || tokens[p] >= n_tokens)
            return -(1 + p);
    }
    return 0;
}

/* Sorts the pairs by expert, so that each record is read once per tile; returns how many there are. */
static int64_t sort_pairs(const int32_t *bank_rows, int64_t pairs, int64_t latent, uint64_t *keys,
                          uint16_t *out) {
    int64_t n = 0;
    for (int64_t p = 0; p < pairs; p++) {
        if (bank_rows[p] < 0)
            memset(out + p * latent, 0, (size_t)latent * sizeof *out);
        else
            keys[n++] = (uint64_t)bank_rows[p] << 32 | (uint64_t)p;
    }
    qsort(keys, (size_t)n, sizeof *keys, by_key);
    return n;
}

int64_t k3_expert_rows(const k3_expert_layout *layout, const uint8_t *arena, int64_t n_rows,
                       const int32_t *bank_rows, const int32_t *tokens, int64_t pairs,
                       const uint16_t *activations, int64_t n_tokens, uint16_t *out) {
    int64_t wrong = first_out_of_range(n_rows, bank_rows, n_tokens, tokens, pairs);
    if (wrong || pairs == 0)
        return wrong;
    const int64_t latent = layout->latent;
    const int64_t x_stride = padded(latent), h_stride = padded(layout->width);
    const int64_t longest = x_stride > h_stride ? x_stride : h_stride;
    const int64_t tile = pairs < TILE ? pairs : TILE;
    const int64_t floats = tile * (x_stride + h_stride) + 2 * longest;
    /* zeros: the places of columns that do not exist are never written */
    float *memory = calloc((size_t)floats, sizeof(float));
    uint64_t *keys = malloc((size_t)pairs * sizeof *keys);
    if (!memory || !keys) {
        free(memory);
        free(keys);
        return INT64_MIN;
    }
    work w = {.layout = layout, .x_stride = x_stride, .h_stride = h_stride, .x = memory};
    w.h = w.x + tile * x_stride;
    w.scale_a = w.h + tile * h_stride;
    w.scale_b = w.scale_a + longest;

    const int64_t n = sort_pairs(bank_rows, pairs, latent, keys, out);
    for (int64_t first = 0, used; first < n; first += used) {
        const uint64_t row = keys[first] >> 32;
        for (used = 0; used < tile && first + used < n && keys[first + used] >> 32 == row; used++)
            unpack_activation(activations + tokens[pair_of(keys[first + used])] * latent, latent,
                              w.x + used * x_stride);
        w.record = arena + (int64_t)row * layout->stride_bytes;
        hidden_rows(&w, used);
        output_rows(&w, used, keys + first, out);
    }
    free(memory);
    free(keys);
    return 0;
}
