/* What an expert kernel's back end is: the inner loops of a row, written once per instruction set.
 *
 * Owns the shapes that the driver (rows.c) and the back ends share. A back end knows packed rows and
 * packed inputs; it must not know records, pairs, threads or where memory comes from.
 */
#pragma once

#include <stdint.h>

enum {
    CHUNK = 128,            /* columns taken at a time: 16 words of 8 codes */
    CHUNK_BYTES = CHUNK / 2,
    CHUNK_SCALES = CHUNK / 16,
    INTERLEAVED = 4,        /* rows whose chunks alternate in an interleaved record */
    TILE = 32,              /* tokens of one expert that a call of dots takes at most */
    INPUT_CHUNK_BYTES = 2 * CHUNK, /* a packed input holds 16 bits of each column */
    PREFETCH_BYTES = 4096,         /* ahead of the weights in work */
};

/* One NVFP4 matrix inside a record. */
typedef struct {
    const uint8_t *weight; /* packed E2M1 codes */
    const uint8_t *scale;  /* E4M3 block scales */
    int64_t columns;       /* a multiple of 16, of 128 when interleaved */
    int interleaved;
} k3_matrix;

/* One token's input, packed chunk by chunk by the back end that will read it. */
typedef struct {
    const uint8_t *values; /* [chunks][INPUT_CHUNK_BYTES], 64-byte aligned */
    const float *scales;   /* [chunks] */
} k3_input;

typedef struct {
    const char *kernel; /* back ends of one kernel give the same bits */
    const char *isa;
    int (*usable)(void);
    /* Packs one chunk of an input, zeros where it has no columns; returns its scale. */
    float (*pack)(const float values[CHUNK], uint8_t packed[INPUT_CHUNK_BYTES]);
    /* sums[t * stride + i] = row (first + i) of the matrix times input t, without scale_2, for
     * i < n and t < tokens <= TILE; first and n are multiples of 4. A row with a scale that is
     * negative or NaN gives NaN, and so does a sum beyond float32. */
    void (*dots)(const k3_matrix *matrix, int64_t first, int64_t n, const k3_input *inputs,
                 int64_t tokens, float *sums, int64_t stride);
    /* h[i] = SiTU(g[i] * scale_g, u[i] * scale_u); n is a multiple of 16. */
    void (*situ)(const float *g, const float *u, float scale_g, float scale_u, float *h, int64_t n);
    /* bits[i] = bf16 of y[i]; n is a multiple of 16. */
    void (*round)(const float *y, uint16_t *bits, int64_t n);
    /* Reads everything once; the value says nothing. */
    uint64_t (*read)(const uint8_t *memory, int64_t bytes);
} k3_backend;

extern const k3_backend k3_int16_portable;
#if defined(__x86_64__)
extern const k3_backend k3_bf16_avx512, k3_int16_avx512, k3_int16_avxvnni, k3_int16_avx2;
#elif defined(__aarch64__)
extern const k3_backend k3_int16_neon;
#endif
