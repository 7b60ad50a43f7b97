/* Registers of 16 lanes: what the AVX-512 back ends share. Included after their target pragma. */
#pragma once

#include "pieces.h"

#include <immintrin.h>

#define PARTS 1
#define TOKENS_MAX 8
#define ROWS_1 4
#define ROWS_2 4
#define ROWS_4 2

typedef __m512 vec;

/* A register of 32 words, a table of 16 of them twice: a permutation by word looks at 5 bits of an
 * index, and so takes the codes of packed weights without a mask. */
INLINE __m512i table_twice(__m256i table) { return _mm512_broadcast_i64x4(table); }

typedef struct {
    __m512i at[4]; /* [k]: weights [i][j] as in deal_pairs */
} weights;

INLINE weights decode_words(const uint8_t *codes, __m512i table) {
    const __m512i words = _mm512_loadu_si512(codes);
    return (weights){{
        _mm512_permutexvar_epi16(words, table),
        _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), table),
        _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 8), table),
        _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 12), table),
    }};
}

typedef struct {
    __m512i at[4]; /* [k]: inputs [i][j] as in deal_pairs */
} packed;

INLINE packed load_packed(const uint8_t *values, int part) {
    (void)part;
    const __m512i *x = (const __m512i *)values;
    return (packed){{x[0], x[1], x[2], x[3]}};
}

/* An E4M3 code without a sign, moved up by 7, is the fp16 of 2^-8 times its value. */
INLINE vec lane_scales(const uint8_t *scales, int part) {
    (void)part;
    const __m256i spread =
        _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, /**/
                         -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    long long codes;
    memcpy(&codes, scales, sizeof codes);
    const __m256i high = _mm256_shuffle_epi8(_mm256_set1_epi64x(codes), spread);
    return _mm512_cvtph_ps(_mm256_srli_epi16(high, 1));
}

INLINE float sum_lanes(const vec parts[PARTS]) {
    const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(parts[0]),
                                   _mm512_extractf32x8_ps(parts[0], 1));
    const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    return (b[0] + b[2]) + (b[1] + b[3]);
}
