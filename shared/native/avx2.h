/* Registers of 8 lanes: what the AVX2 back ends share. Included after their target pragma and after
 * they have defined dot_pairs. Weights are 256 times their integer, because the two nibbles of a byte
 * reach the high bytes of words with fewer instructions than the low ones; a sum of 8 products still
 * fits 32 bits, is a multiple of 256, and so as exact in float32 as without the factor. */
#pragma once

#include "pieces.h"

#include <immintrin.h>

#define PARTS 2
#define TOKENS_MAX 4
#define ROWS_1 2
#define ROWS_2 1
#define ROWS_4 1
#define FINAL 1.0f

typedef __m256 vec;

typedef struct {
    __m256i at[4]; /* [k]: weights [i][j] as in deal_pairs, of 8 lanes */
} weights;

INLINE weights decode(const uint8_t *codes, int part) {
    const __m256i doubled =
        _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, /**/
                         0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i nibble = _mm256_set1_epi8(15), high = _mm256_set1_epi16((int16_t)0xff00);
    const __m256i words = _mm256_loadu_si256((const __m256i *)(codes + part * 32));
    const __m256i even = _mm256_shuffle_epi8(doubled, _mm256_and_si256(words, nibble));
    const __m256i odd = _mm256_shuffle_epi8(
        doubled, _mm256_and_si256(_mm256_srli_epi16(words, 4), nibble));
    return (weights){{
        _mm256_slli_epi16(even, 8),
        _mm256_slli_epi16(odd, 8),
        _mm256_and_si256(even, high),
        _mm256_and_si256(odd, high),
    }};
}

/* An E4M3 code without a sign, moved up by 7, is the fp16 of 2^-8 times its value. */
INLINE vec lane_scales(const uint8_t *scales, int part) {
    const __m128i spread =
        _mm_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3);
    int32_t codes;
    memcpy(&codes, scales + part * 4, sizeof codes);
    const __m128i high = _mm_shuffle_epi8(_mm_cvtsi32_si128(codes), spread);
    return _mm256_cvtph_ps(_mm_srli_epi16(high, 1));
}

typedef struct {
    __m256i at[4]; /* [k]: inputs [i][j] as in deal_pairs, of 8 lanes */
} packed;

INLINE packed load_packed(const uint8_t *values, int part) {
    const __m256i *x = (const __m256i *)(values + part * 32);
    return (packed){{x[0], x[2], x[4], x[6]}};
}

INLINE vec accumulate(weights w, vec scale, packed x, float x_scale, vec acc) {
    const __m256i d = dot_pairs(w.at[0], x.at[0], w.at[1], x.at[1], w.at[2], x.at[2], w.at[3],
                                x.at[3]);
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), _mm256_mul_ps(scale, _mm256_set1_ps(x_scale)),
                           acc);
}

INLINE float sum_lanes(const vec parts[PARTS]) {
    const __m256 a = _mm256_add_ps(parts[0], parts[1]);
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    return (b[0] + b[2]) + (b[1] + b[3]);
}

/* The scale takes the factor 256 back; exact, because no scale is near the smallest numbers. */
static float pack(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    return pack_int16_pairs(values, packed) * (1.0f / 256);
}
