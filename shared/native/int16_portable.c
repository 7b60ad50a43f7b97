/* Kernel "int16" in plain C: correct on any machine; slow where fmaf is a function of the library. */
#include "pieces.h"

#include <math.h>

#define PARTS 16
#define TOKENS_MAX 4
#define ROWS_1 1
#define ROWS_2 1
#define ROWS_4 1
#define FINAL 1.0f

typedef float vec;

typedef struct {
    int16_t at[4][2]; /* [k][j] of one lane, as in deal_pairs */
} weights;

INLINE weights decode(const uint8_t *codes, int part) {
    static const int8_t doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint8_t *word = codes + part * 4;
    weights w;
    for (int j = 0; j < 2; j++)
        for (int k = 0; k < 4; k++)
            w.at[k][j] = doubled[word[2 * j + k / 2] >> k % 2 * 4 & 15];
    return w;
}

/* E4M3 without a sign: (8 + m) 2^(e - 10), or m 2^-9 when e is zero; times 2^-8. */
INLINE vec lane_scales(const uint8_t *scales, int part) {
    const uint32_t code = scales[part / 2], exponent = code >> 3 & 15, mantissa = code & 7;
    const uint32_t integer = exponent ? 8 + mantissa : mantissa;
    return (float)integer * as_float((127 - 18 + (exponent ? exponent : 1)) << 23);
}

typedef struct {
    int16_t at[4][2]; /* [k][j] of one lane, as in deal_pairs */
} packed;

INLINE packed load_packed(const uint8_t *values, int part) {
    packed x;
    for (int k = 0; k < 4; k++)
        memcpy(x.at[k], values + k * 64 + part * sizeof x.at[k], sizeof x.at[k]);
    return x;
}

INLINE vec accumulate(weights w, vec scale, packed x, float x_scale, vec acc) {
    int32_t d = 0;
    for (int k = 0; k < 4; k++)
        d += w.at[k][0] * x.at[k][0] + w.at[k][1] * x.at[k][1];
    return fmaf((float)d, scale * x_scale, acc);
}

INLINE float sum_lanes(const vec parts[PARTS]) {
    float a[8], b[4];
    for (int i = 0; i < 8; i++)
        a[i] = parts[i] + parts[i + 8];
    for (int i = 0; i < 4; i++)
        b[i] = a[i] + a[i + 4];
    return (b[0] + b[2]) + (b[1] + b[3]);
}

#include "dots.h"

static float pack(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]) {
    return pack_int16_pairs(values, packed);
}

static int usable(void) { return 1; }

const k3_backend k3_int16_portable = {"int16", "portable", usable, pack,
                                      dots, situ_rows, round_rows, read_all};
