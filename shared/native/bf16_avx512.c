/* Kernel "bf16" for AVX-512 with BF16: products of bf16 pairs summed in float32 by the machine, in its
 * own order and without subnormals, so no other instruction set can give these bits. */
#if defined(__x86_64__)
#pragma GCC target("arch=x86-64-v4,avx512bf16")
#include "avx512.h"

#define FINAL 256.0f /* scales are read as 2^-8 of their value */

INLINE weights decode(const uint8_t *codes, int part) {
    (void)part;
    const __m256i bits = _mm256_setr_epi16(
        0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, /* 0 to 6, then their negatives */
        0, (int16_t)0xbf00, (int16_t)0xbf80, (int16_t)0xbfc0, (int16_t)0xc000, (int16_t)0xc040,
        (int16_t)0xc080, (int16_t)0xc0c0);
    return decode_words(codes, table_twice(bits));
}

INLINE vec accumulate(weights w, vec scale, packed x, float x_scale, vec acc) {
    (void)x_scale;
    __m512 d = _mm512_setzero_ps();
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++)
        d = _mm512_dpbf16_ps(d, (__m512bh)w.at[k], (__m512bh)x.at[k]);
    return _mm512_fmadd_ps(d, scale, acc);
}

#include "dots.h"

static float pack(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    int16_t bits[CHUNK], dealt[4][16][2];
    for (int i = 0; i < CHUNK; i++)
        bits[i] = (int16_t)bf16_round(values[i]);
    deal_pairs(bits, dealt);
    memcpy(packed, dealt, sizeof dealt);
    return 1.0f;
}

static int usable(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512bf16") &&
           __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

const k3_backend k3_bf16_avx512 = {"bf16", "avx512", usable, pack, dots, situ_rows, round_rows, read_all};
#endif
