/* Pieces of a row that every back end compiles for its own instruction set: bits of floats, the
 * activation function, and how an input becomes integers. Only + - * / and integer operations, no
 * contraction: the same bits everywhere, whatever the machine does with subnormal numbers.
 */
#pragma once

#include "backend.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

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

#define NAN_BITS 0x7fc00000u

INLINE int is_finite(float f) { return (as_bits(f) & 0x7f800000) != 0x7f800000; }

/* A sum that left the range of float32 on its way says nothing about where it would have ended, and
 * the activation function would make a plausible value of an infinity. */
INLINE float nan_unless_finite(float sum) { return is_finite(sum) ? sum : as_float(NAN_BITS); }

/* bf16 bits of a float: nearest even; every NaN becomes the same one, because which NaN an operation
 * passes on is the compiler's choice, and a subnormal becomes zero, because some machines do that
 * on their own. */
INLINE uint16_t bf16_round(float f) {
    const uint32_t bits = as_bits(f), magnitude = bits & 0x7fffffff;
    const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const uint32_t kept = magnitude < 0x00800000 ? bits >> 31 << 15 : rounded;
    return (uint16_t)(magnitude > 0x7f800000 ? 0x7fc0 : kept);
}

/* The mask tells the compiler that it needs whole registers only. */
static void round_rows(const float *restrict y, uint16_t *restrict bits, int64_t n) {
    for (int64_t i = 0; i < (n & ~15); i++)
        bits[i] = bf16_round(y[i]);
}

/* ---- SiTU ---- */

/* x, no further from zero than bound; a NaN stays. Masks instead of branches, so that the compiler
 * makes vectors of it. */
INLINE float limited(float x, float bound) {
    const uint32_t bits = as_bits(x);
    const int32_t magnitude = (int32_t)(bits & 0x7fffffff), most = (int32_t)as_bits(bound);
    const int32_t over = -(int32_t)(magnitude > most) & -(int32_t)(magnitude <= 0x7f800000);
    return as_float((uint32_t)((magnitude & ~over) | (most & over)) | (bits & 0x80000000));
}

/* exp(x) = scale * (1 + tail), |tail| < 0.42. For |x| <= 87; a NaN gives a NaN tail. */
INLINE float exp_parts(float x, float *tail) {
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float shifted = x * 1.44269504f + magic;
    const float n = shifted - magic;
    float r = x - n * 0.693359375f; /* ln 2 in two parts, the first one exact in 9 bits */
    r = r - n * -2.12194440e-4f;
    float p = r * (1.0f / 5040) + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    *tail = p * (r * r) + r;
    return as_float((as_bits(shifted) << 23) + 0x3f800000);
}

INLINE float tanh_f(float x) {
    const uint32_t sign = as_bits(x) & 0x80000000;
    const float a = limited(as_float(as_bits(x) & 0x7fffffff), 10.0f); /* tanh(10) is 1 in f32 */
    float tail;
    const float scale = exp_parts(a + a, &tail);
    const float expm1 = scale * tail + (scale - 1.0f);
    return as_float(as_bits(expm1 / (expm1 + 2.0f)) | sign);
}

/* 1 / (1 + exp(-x)); never below exp(-87), the smallest exponential that is a normal number. */
INLINE float sigmoid(float x) {
    float tail;
    const float scale = exp_parts(limited(-x, 87.0f), &tail);
    return 1.0f / (1.0f + (scale + scale * tail));
}

/* 4 tanh(g/4) sigmoid(g) x 25 tanh(u/25): K3's activation, beta 4 and linear beta 25. */
static void situ_rows(const float *restrict g, const float *restrict u, float scale_g,
                      float scale_u, float *restrict h, int64_t n) {
    for (int64_t i = 0; i < (n & ~15); i++) {
        const float gate = g[i] * scale_g, up = u[i] * scale_u;
        h[i] = (4.0f * tanh_f(gate * 0.25f) * sigmoid(gate)) * (25.0f * tanh_f(up / 25.0f));
    }
}

/* ---- inputs as integers ---- */

/* The largest integer used, 127 * 256 + 127, so that it splits into two signed bytes. */
#define INTEGER_MAX 32639.0f
/* Twice the weights are integers, and scales are read as 2^-8 of their value: 2^8 / 2. */
#define UNIT 128.0f

/* Rounds 128 values to integers in [-32639, 32639] of one step per chunk, and returns the scale that
 * undoes it (UNIT included). A chunk below 2^-64 everywhere keeps the step of 2^-64, so that no
 * product further on is subnormal. A NaN makes the scale NaN; an infinity makes it infinite and all
 * integers zero, and zero times infinity is NaN: every sum becomes one. */
INLINE float quantise(const float values[CHUNK], int16_t integers[CHUNK]) {
    uint32_t largest = 0x1f800000; /* 2^-64 */
    for (int i = 0; i < CHUNK; i++) {
        const uint32_t magnitude = as_bits(values[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const float amax = as_float(largest), inverse = INTEGER_MAX / amax;
    for (int i = 0; i < CHUNK; i++) /* rounded by adding 1.5 * 2^23 */
        integers[i] = (int16_t)(as_bits(values[i] * inverse + 12582912.0f) & 0xffff);
    return amax * (UNIT / INTEGER_MAX);
}

/* Column 8i + k + 4j of a chunk goes to place [k][i][j]: bits 4k of the two halves j of the i-th
 * 32-bit word of the packed weights, so that one shift of a register of weights meets one register
 * of inputs, and lane i sums columns 8i to 8i + 7. */
INLINE void deal_pairs(const int16_t from[CHUNK], int16_t to[4][16][2]) {
    for (int k = 0; k < 4; k++)
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < 2; j++)
                to[k][i][j] = from[8 * i + k + 4 * j];
}

INLINE float pack_int16_pairs(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    int16_t integers[CHUNK], dealt[4][16][2];
    const float scale = quantise(values, integers);
    deal_pairs(integers, dealt);
    memcpy(packed, dealt, sizeof dealt);
    return scale;
}

/* ---- the read probe ---- */

/* Loads and prefetches as a kernel does, and nothing else. */
static uint64_t read_all(const uint8_t *memory, int64_t bytes) {
    typedef uint64_t words __attribute__((vector_size(64)));
    words found[4] = {0};
    for (int64_t i = 0; i + 256 <= bytes; i += 256)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            const uint8_t *from = memory + i + j * 64;
            words loaded;
            __builtin_prefetch((const void *)((uintptr_t)from + PREFETCH_BYTES));
            memcpy(&loaded, from, sizeof loaded);
            found[j] ^= loaded;
        }
    const words all = found[0] ^ found[1] ^ found[2] ^ found[3];
    return all[0] ^ all[1] ^ all[2] ^ all[3] ^ all[4] ^ all[5] ^ all[6] ^ all[7];
}
