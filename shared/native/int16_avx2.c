/* Kernel "int16" for AVX2 with FMA and F16C (x86-64-v3). */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v3")
#include "pieces.h"

#include <immintrin.h>

INLINE __m256i dot_pairs(__m256i a, __m256i x, __m256i b, __m256i y, __m256i c, __m256i z,
                         __m256i d, __m256i w) {
    const __m256i first = _mm256_add_epi32(_mm256_madd_epi16(a, x), _mm256_madd_epi16(b, y));
    const __m256i second = _mm256_add_epi32(_mm256_madd_epi16(c, z), _mm256_madd_epi16(d, w));
    return _mm256_add_epi32(first, second);
}

#include "avx2.h"

#include "dots.h"

static int usable(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2");
}

const k3_backend k3_int16_avx2 = {"int16", "avx2", usable, pack, dots, situ_rows, round_rows, read_all};
#endif
