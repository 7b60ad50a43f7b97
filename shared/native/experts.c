/* See experts.h. Written with GCC vector types as wide as the machine's registers; everything is
 * defined for 16 lanes and gives the same bits on any machine:
 *  - a weight is E2M1 x E4M3 (6 significant bits) and an input is bf16 (8), so every product is exact
 *    (inputs below 2^-120 aside) and a fused multiply-add equals a separate one;
 *  - the columns of a row are dealt to 16 accumulators in a fixed way (see deal_column), summed
 *    in column order within a lane and by a fixed tree at the end, whatever the number of tokens;
 *  - the activation function uses multiplication, addition and division only.
 */
#include "experts.h"

#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* Lanes of one register; GCC keeps wider vectors in memory, which costs a factor of ten. */
#if defined(__AVX512F__)
#define WIDE 16
#elif defined(__AVX2__)
#define WIDE 8
#else
#define WIDE 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDE)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDE)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDE)));
typedef float vec4 __attribute__((vector_size(16)));
typedef float vec8 __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

enum {
    LANES = 16,               /* accumulators of a row, whatever the machine's registers hold */
    PARTS = LANES / WIDE,
    CHUNK = 128,              /* columns decoded at a time: 16 words of 8 nibbles */
    CHUNK_BYTES = CHUNK / 2,
    CHUNK_SCALES = CHUNK / 16,
    INTERLEAVED = 4,          /* rows whose chunks alternate in an interleaved record */
    TILE = 32,                /* tokens of one expert whose inputs are unpacked at a time */
    TOKENS_MAX = 4,           /* tokens that share one decoding of a weight */
    PREFETCH_BYTES = 4096,    /* ahead of the weights in work: 6.1 -> 9.2 GB/s out of memory */
};

/* ---- small pieces ---- */

INLINE vec load(const float *p) {
    vec v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* a * b + c. The product is exact here, so fused or not gives the same bits; fusing is asked for by
 * name because the flags forbid the compiler to do it where it would change them. */
INLINE vec multiply_add(vec a, vec b, vec c) {
#if defined(__AVX512F__)
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE vec choose(ivec mask, vec yes, vec no) {
    return (vec)((mask & (ivec)yes) | (~mask & (ivec)no));
}

/* Sum of 16 lanes, always by the same tree: i + (i + 8), then i + (i + 4), i + (i + 2), 0 + 1. */
INLINE float sum_lanes(const vec parts[PARTS]) {
#if WIDE == 16
    const vec v = parts[0];
    const vec8 a = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#elif WIDE == 8
    const vec8 a = parts[0] + parts[1];
#endif
#if WIDE == 4
    const vec4 b = (parts[0] + parts[2]) + (parts[1] + parts[3]);
#else
    const vec4 b =
        __builtin_shufflevector(a, a, 0, 1, 2, 3) + __builtin_shufflevector(a, a, 4, 5, 6, 7);
#endif
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* bf16 bits of a float: nearest even; every NaN becomes the same one, because which NaN an operation
 * passes on is the compiler's choice. */
INLINE uvec bf16_round(vec v) {
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uvec is_nan = (uvec)(v != v);
    return (is_nan & 0x7fc0) | (~is_nan & rounded);
}

INLINE float as_float(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

INLINE uint32_t as_bits(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
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
INLINE vec exp_parts(vec x, vec *tail) {
    const vec magic = (vec){0} + 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * 1.44269504f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f; /* ln 2 in two parts, the first one exact in 9 bits */
    r = r - n * -2.12194440e-4f;
    vec p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    *tail = p * (r * r) + r;
    return (vec)(((uvec)shifted << 23) + 0x3f800000);
}

INLINE vec tanh_vec(vec x) {
    const ivec sign = (ivec)x & INT32_MIN;
    vec a = (vec)((ivec)x & INT32_MAX);
    a = choose(a > 10.0f, (vec){0} + 10.0f, a); /* tanh(10) is 1 in f32 */
    vec tail;
    vec scale = exp_parts(a + a, &tail);
    vec expm1 = scale * tail + (scale - 1.0f);
    return (vec)((ivec)(expm1 / (expm1 + 2.0f)) | sign);
}

/* 1 / (1 + exp(-x)); never below exp(-87), the smallest exponential that is a normal number. */
INLINE vec sigmoid(vec x) {
    vec a = -x;
    a = choose(a > 87.0f, (vec){0} + 87.0f, a);
    a = choose(a < -87.0f, (vec){0} - 87.0f, a);
    vec tail;
    vec scale = exp_parts(a, &tail);
    return 1.0f / (1.0f + (scale + scale * tail));
}

/* 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25): K3's activation, beta 4 and linear beta 25. */
INLINE vec situ(vec g, vec u) {
    return (4.0f * tanh_vec(g * 0.25f) * sigmoid(g)) * (25.0f * tanh_vec(u / 25.0f));
}

void k3_situ(const float *g, const float *u, float *h, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDE) {
        vec v = situ(load(g + i), load(u + i));
        memcpy(h + i, &v, sizeof v);
    }
}

/* ---- dot products of packed rows ---- */

/* E4M3 bytes to floats; n is a multiple of 16. Masks instead of branches, so that the compiler makes
 * vectors of it, and no subnormal float on the way, because those cost 100 cycles each: a subnormal
 * m/8 * 2^-6 is (1 + m/8) * 2^-6 - 2^-6. */
static void unpack_scales(const uint8_t *restrict codes, int64_t n, float *restrict scales) {
    for (int64_t i = 0; i < (n & ~15); i++) {
        const uint32_t code = codes[i];
        const uint32_t is_subnormal = -(uint32_t)((code & 0x78) == 0);
        const uint32_t is_nan = -(uint32_t)((code & 0x7f) == 0x7f);
        const uint32_t magnitude = (((code & 0x7f) | (is_subnormal & 8)) << 20) + (120u << 23);
        const float value = as_float(magnitude | (is_nan & 0x7fc00000)) -
                            as_float(is_subnormal & (121u << 23)); /* 2^-6 */
        scales[i] = as_float(as_bits(value) | (code & 0x80) << 24);
    }
}

typedef struct {
    const uint8_t *weight; /* first packed bytes of one row */
    const float *scale;    /* its first unpacked block scales */
} packed_row;

/* Weights k, 8 + k, 16 + k ... of a chunk, block scale applied. A variable shuffle looks at as many
 * bits of an index as its table needs. */
INLINE vec decode(uvec words, int k, vec scale) {
    const uvec code = words >> (4 * k);
#if WIDE == 16
    const vec e2m1 = {0, .5f, 1, 1.5f, 2, 3, 4, 6, 0, -.5f, -1, -1.5f, -2, -3, -4, -6};
    return __builtin_shuffle(e2m1, (ivec)code) * scale;
#else
#if WIDE == 8
    const vec magnitudes = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
    const vec magnitude = __builtin_shuffle(magnitudes, (ivec)code);
#else
    /* twice the value as an integer, 0 1 2 3 4 6 8 12: (2 + m) << (e - 1), or m where e is 0 */
    const uvec normal = (uvec)((code & 6) != 0);
    const uvec twice = ((code & 1) | (normal & 2)) << (((code >> 1) & 3) + normal);
    const vec magnitude = __builtin_convertvector((ivec)twice, vec) * 0.5f;
#endif
    return (vec)((uvec)magnitude | ((code & 8) << 28)) * scale;
#endif
}

/* The packed bytes of one chunk, zeros where the row ends; reads no byte beyond the row. From chunk
 * to chunk of a row it is `apart` chunks: 1, or INTERLEAVED, where no row ends inside a chunk. */
INLINE const uint8_t *packed_chunk(packed_row row, int64_t first, int64_t columns,
                                   const int64_t apart, uint8_t tail[CHUNK_BYTES]) {
    const uint8_t *from = row.weight + first / 2 * apart;
    __builtin_prefetch((const void *)((uintptr_t)from + PREFETCH_BYTES));
    if (__builtin_expect(columns - first >= CHUNK, 1))
        return from;
    memset(tail, 0, CHUNK_BYTES);
    memcpy(tail, from, (size_t)(columns - first) / 2);
    return tail;
}

/* The block scales of one chunk, zeros where the row ends. */
INLINE const float *chunk_scales(packed_row row, int64_t first, int64_t columns,
                                 const int64_t apart, float tail[CHUNK_SCALES]) {
    if (__builtin_expect(columns - first >= CHUNK, 1))
        return row.scale + first / 16 * apart;
    memset(tail, 0, CHUNK_SCALES * sizeof *tail);
    memcpy(tail, row.scale + first / 16, (size_t)(columns - first) / 16 * sizeof *tail);
    return tail;
}

/* Block scale of every lane of a part: 16 columns share one, and a lane has 8. */
INLINE vec lane_scales(const float *scales, int part) {
    const float *from = scales + part * (WIDE / 2);
#if WIDE == 16
    vec8 s;
    memcpy(&s, from, sizeof s);
    return __builtin_shufflevector(s, s, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
#elif WIDE == 8
    vec4 s;
    memcpy(&s, from, sizeof s);
    return __builtin_shufflevector(s, s, 0, 0, 1, 1, 2, 2, 3, 3);
#else
    return (vec){from[0], from[0], from[1], from[1]};
#endif
}

INLINE uvec lane_words(const uint8_t *chunk, int part) {
    uvec words;
    memcpy(&words, chunk + part * sizeof words, sizeof words);
    return words;
}

/* Two rows (a, b) against a few tokens: sum_a[t * step] and sum_b[t * step]. `apart` and `tokens` are
 * constants at every call, so that addresses cost nothing and the accumulators stay in registers. */
INLINE void dot_block(packed_row a, packed_row b, int64_t columns, const int64_t apart,
                      const float *x, int64_t x_stride, const int tokens, float *sum_a,
                      float *sum_b, int64_t step) {
    vec parts_a[TOKENS_MAX][PARTS], parts_b[TOKENS_MAX][PARTS];
    for (int part = 0; part < PARTS; part++) {
        vec acc_a[TOKENS_MAX] = {{0}}, acc_b[TOKENS_MAX] = {{0}};
        for (int64_t first = 0; first < columns; first += CHUNK) {
            uint8_t tail_a[CHUNK_BYTES], tail_b[CHUNK_BYTES];
            float scales_a[CHUNK_SCALES], scales_b[CHUNK_SCALES];
            const uvec words_a = lane_words(packed_chunk(a, first, columns, apart, tail_a), part);
            const uvec words_b = lane_words(packed_chunk(b, first, columns, apart, tail_b), part);
            const vec scale_a = lane_scales(chunk_scales(a, first, columns, apart, scales_a), part);
            const vec scale_b = lane_scales(chunk_scales(b, first, columns, apart, scales_b), part);
            const float *inputs = x + first + part * WIDE;
#pragma GCC unroll 8
            for (int k = 0; k < 8; k++) {
                const vec weight_a = decode(words_a, k, scale_a);
                const vec weight_b = decode(words_b, k, scale_b);
#pragma GCC unroll 4
                for (int t = 0; t < tokens; t++) {
                    const vec input = load(inputs + t * x_stride + k * LANES);
                    acc_a[t] = multiply_add(weight_a, input, acc_a[t]);
                    acc_b[t] = multiply_add(weight_b, input, acc_b[t]);
                }
            }
        }
#pragma GCC unroll 4
        for (int t = 0; t < tokens; t++) {
            parts_a[t][part] = acc_a[t];
            parts_b[t][part] = acc_b[t];
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        sum_a[t * step] = sum_lanes(parts_a[t]);
        sum_b[t * step] = sum_lanes(parts_b[t]);
    }
}

/* dot_block for 1 to TOKENS_MAX tokens. How many share a call decides how often a weight is decoded,
 * never the order in which a sum is taken. */
INLINE void dot_tokens(packed_row a, packed_row b, int64_t columns, const int64_t apart,
                       const float *x, int64_t x_stride, int64_t tokens, float *sum_a, float *sum_b,
                       int64_t step) {
    switch (tokens) {
    case 1: dot_block(a, b, columns, apart, x, x_stride, 1, sum_a, sum_b, step); break;
    case 2: dot_block(a, b, columns, apart, x, x_stride, 2, sum_a, sum_b, step); break;
    case 3: dot_block(a, b, columns, apart, x, x_stride, 3, sum_a, sum_b, step); break;
    case 4: dot_block(a, b, columns, apart, x, x_stride, 4, sum_a, sum_b, step); break;
    }
}

/* The same for rows of a record in either order; the sums have the same bits. */
static void dot_rows(packed_row a, packed_row b, int64_t columns, int64_t interleaved,
                     const float *x, int64_t x_stride, int64_t tokens, float *sum_a, float *sum_b,
                     int64_t step) {
    if (interleaved)
        dot_tokens(a, b, columns, INTERLEAVED, x, x_stride, tokens, sum_a, sum_b, step);
    else
        dot_tokens(a, b, columns, 1, x, x_stride, tokens, sum_a, sum_b, step);
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

/* Unpacks the block scales of 16 rows from `row` on; they lie together, in either order. */
static void open_rows(const work *w, int matrix, int64_t row, int64_t columns, float *scale) {
    const int64_t blocks = columns / 16;
    unpack_scales(w->record + w->layout->scale[matrix] + row * blocks, LANES * blocks, scale);
}

/* Row `row` of a matrix; `scale` holds the scales of the 16 rows it belongs to. */
INLINE packed_row one_row(const work *w, int matrix, int64_t row, int64_t columns,
                          const float *scale) {
    const uint8_t *weight = w->record + w->layout->weight[matrix];
    const int64_t among = row % LANES; /* those 16 */
    if (!w->layout->interleaved)
        return (packed_row){weight + row * (columns / 2), scale + among * (columns / 16)};
    const int64_t lane = row % INTERLEAVED; /* its place in its group, whose rows start together */
    return (packed_row){weight + (row - lane) * (columns / 2) + lane * CHUNK_BYTES,
                        scale + (among - lane) * (columns / 16) + lane * CHUNK_SCALES};
}

/* h = bf16(SiTU(W1 x, W3 x)), 16 elements of every token at a time. */
static void hidden_rows(const work *w, int64_t tokens) {
    const int64_t latent = w->layout->latent, interleaved = w->layout->interleaved;
    const float scale_g = f32_at(w->record + w->layout->scale_2[W1]);
    const float scale_u = f32_at(w->record + w->layout->scale_2[W3]);
    float g[TILE][LANES], u[TILE][LANES];
    for (int64_t o = 0; o < w->layout->width; o += LANES) {
        open_rows(w, W1, o, latent, w->scale_a);
        open_rows(w, W3, o, latent, w->scale_b);
        for (int64_t t = 0; t < tokens; t += TOKENS_MAX) {
            const int64_t n = least(tokens - t, TOKENS_MAX);
            const float *x = w->x + t * w->x_stride;
            for (int64_t i = 0; i < LANES; i += 2) {
                packed_row gate = one_row(w, W1, o + i, latent, w->scale_a);
                packed_row up = one_row(w, W3, o + i, latent, w->scale_b);
                packed_row gate_2 = one_row(w, W1, o + i + 1, latent, w->scale_a);
                packed_row up_2 = one_row(w, W3, o + i + 1, latent, w->scale_b);
                if (interleaved) { /* neighbours share the memory that is fetched */
                    dot_rows(gate, gate_2, latent, 1, x, w->x_stride, n, &g[t][i], &g[t][i + 1],
                             LANES);
                    dot_rows(up, up_2, latent, 1, x, w->x_stride, n, &u[t][i], &u[t][i + 1], LANES);
                } else {
                    dot_rows(gate, up, latent, 0, x, w->x_stride, n, &g[t][i], &u[t][i], LANES);
                    dot_rows(gate_2, up_2, latent, 0, x, w->x_stride, n, &g[t][i + 1],
                             &u[t][i + 1], LANES);
                }
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            float h[LANES];
            for (int64_t i = 0; i < LANES; i += WIDE) {
                vec act = situ(load(&g[t][i]) * scale_g, load(&u[t][i]) * scale_u);
                vec rounded = (vec)(bf16_round(act) << 16);
                memcpy(&h[i], &rounded, sizeof rounded);
            }
            for (int64_t i = 0; i < LANES; i++)
                w->h[t * w->h_stride + deal_column(o + i)] = h[i];
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
                dot_rows(a, b, width, w->layout->interleaved, w->h + t * w->h_stride, w->h_stride,
                         n, &y[t][i], &y[t][i + 1], LANES);
            }
        }
        for (int64_t t = 0; t < tokens; t++) {
            uint16_t *row = out + pair_of(keys[t]) * latent + o;
            for (int64_t i = 0; i < LANES; i += WIDE) {
                uvec bits = bf16_round(load(&y[t][i]) * scale_y);
                for (int64_t j = 0; j < WIDE; j++)
                    row[i + j] = (uint16_t)bits[j];
            }
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
