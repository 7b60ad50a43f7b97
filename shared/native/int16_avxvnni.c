/* Kernel "int16" for AVX2 with AVX-VNNI: as int16_avx2.c, multiply and add in one instruction. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v3,avxvnni")
#include "pieces.h"

#include <cpuid.h>
#include <immintrin.h>

INLINE __m256i dot_pairs(__m256i a, __m256i x, __m256i b, __m256i y, __m256i c, __m256i z,
                         __m256i d, __m256i w) {
    __m256i sum = _mm256_dpwssd_avx_epi32(_mm256_setzero_si256(), a, x);
    sum = _mm256_dpwssd_avx_epi32(sum, b, y);
    sum = _mm256_dpwssd_avx_epi32(sum, c, z);
    return _mm256_dpwssd_avx_epi32(sum, d, w);
}

#include "avx2.h"

#include "dots.h"

/* The compiler's list of features does not have AVX-VNNI: leaf 7, subleaf 1, EAX bit 4. */
static int usable(void) {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
           __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2") &&
           __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

const k3_backend k3_int16_avxvnni = {"int16", "avxvnni", usable, pack, dots, situ_rows, round_rows, read_all};
#endif
