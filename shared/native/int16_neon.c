/* Kernel "int16" for ARMv8.2 with dot products: an input is two planes of signed bytes. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#include "pieces.h"

#include <arm_neon.h>
#include <sys/auxv.h>

#define PARTS 4
#define TOKENS_MAX 4
#define ROWS_1 4
#define ROWS_2 2
#define ROWS_4 1
#define FINAL 1.0f

typedef float32x4_t vec;

typedef struct {
    int8x16_t even, odd; /* columns of one part of a chunk */
} weights;

INLINE weights decode(const uint8_t *codes, int part) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t table = vld1q_s8(doubled);
    const uint8x16_t bytes = vld1q_u8(codes + part * 16);
    return (weights){vqtbl1q_s8(table, vandq_u8(bytes, vdupq_n_u8(15))),
                     vqtbl1q_s8(table, vshrq_n_u8(bytes, 4))};
}

/* An E4M3 code without a sign, moved up by 7, is the fp16 of 2^-8 times its value. */
INLINE vec lane_scales(const uint8_t *scales, int part) {
    const uint16_t first = (uint16_t)(scales[part * 2] << 7);
    const uint16_t second = (uint16_t)(scales[part * 2 + 1] << 7);
    const uint16x4_t bits = {first, first, second, second};
    return vcvt_f32_f16(vreinterpret_f16_u16(bits));
}

typedef struct {
    int8x16_t high_even, high_odd, low_even, low_odd; /* bytes of one part of a chunk */
} packed;

INLINE packed load_packed(const uint8_t *values, int part) {
    const int8_t *x = (const int8_t *)values + part * 16;
    return (packed){vld1q_s8(x), vld1q_s8(x + 64), vld1q_s8(x + 128), vld1q_s8(x + 192)};
}

INLINE vec accumulate(weights w, vec scale, packed x, float x_scale, vec acc) {
    int32x4_t d = vdotq_s32(vdotq_s32(vdupq_n_s32(0), w.even, x.high_even), w.odd, x.high_odd);
    d = vdotq_s32(vdotq_s32(vshlq_n_s32(d, 8), w.even, x.low_even), w.odd, x.low_odd);
    return vfmaq_f32(acc, vcvtq_f32_s32(d), vmulq_n_f32(scale, x_scale));
}

INLINE float sum_lanes(const vec parts[PARTS]) {
    const float32x4_t b = vaddq_f32(vaddq_f32(parts[0], parts[2]), vaddq_f32(parts[1], parts[3]));
    return (b[0] + b[2]) + (b[1] + b[3]);
}

#include "dots.h"

static float pack(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    int16_t integers[CHUNK];
    const float scale = quantise(values, integers);
    for (int i = 0; i < CHUNK; i++) {
        const int high = (integers[i] + 128) >> 8, low = integers[i] - 256 * high;
        const int place = i % 2 * 64 + i / 2;
        packed[place] = (uint8_t)high;
        packed[128 + place] = (uint8_t)low;
    }
    return scale;
}

static int usable(void) { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }

const k3_backend k3_int16_neon = {"int16", "neon", usable, pack, dots, situ_rows, round_rows, read_all};
#endif
