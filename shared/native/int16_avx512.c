/* Kernel "int16" for AVX-512 with VNNI: one multiply-add sums two products of 16-bit integers. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v4,avx512vnni")
#include "avx512.h"

#define FINAL 1.0f

INLINE weights decode(const uint8_t *codes, int part) {
    (void)part;
    const __m256i doubled = _mm256_setr_epi16(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return decode_words(codes, table_twice(doubled));
}

INLINE vec accumulate(weights w, vec scale, packed x, float x_scale, vec acc) {
    __m512i d = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        d = _mm512_dpwssd_epi32(d, w.at[k], x.at[k]);
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(d), _mm512_mul_ps(scale, _mm512_set1_ps(x_scale)),
                           acc);
}

#include "dots.h"

static float pack(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    return pack_int16_pairs(values, packed);
}

static int usable(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vnni") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

const k3_backend k3_int16_avx512 = {"int16", "avx512", usable, pack, dots, situ_rows, round_rows, read_all};
#endif
