/* One expert's MLP by the products of ggml: its NVFP4 x Q8_0 vec_dot, its Q8_0 quantiser and its
 * SwiGLU, called from a loop of ours.
 *
 * Owns the loop: 16 rows by 16 tokens as in ggml's own mul_mat, but no graph, on the thread pool that
 * our kernels use too, with all experts of a call in each phase. All of that favours ggml. Must not
 * know where ggml came from. Compiled against its sources when the benchmark runs.
 */
#include "ggml-impl.h"
#include "quants.h"

#include "pool.h"

#define EXPORTED __attribute__((visibility("default")))

/* ggml-cpu.c defines these and fills them once; that file drags in everything else */
float ggml_table_f32_f16[1 << 16];
float ggml_table_f32_e8m0_half[1 << 8];
float ggml_table_f32_ue4m3[1 << 8];

void ggml_vec_swiglu_f32(const int n, float *y, const float *x, const float *g); /* vec.h is C++ */

enum { GATE, UP, DOWN, MATRICES };
enum { PACK, HIDDEN, OUTPUT, PHASES };
enum { UNIT_ROWS = 64, BLOCK_ROWS = 16, BLOCK_TOKENS = 16 }; /* blocks: mul_mat's own */

typedef struct {
    int64_t latent, width, stride_bytes; /* a record: gate, up, down, then their three scales */
    const uint8_t *records;
    const int32_t *experts;
    const float *x; /* [tokens][latent] */
    float *out;     /* [experts][tokens][latent] */
    int64_t n_experts, n_tokens;
    block_q8_0 *x_q8, *h_q8; /* [tokens][latent / 32], [experts][tokens][width / 32] */
} call;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static size_t row_bytes(int64_t columns) { return (size_t)(columns / QK_NVFP4) * sizeof(block_nvfp4); }

static const uint8_t *matrix_of(const call *c, const uint8_t *record, int which) {
    return record + (size_t)which * (size_t)c->width * row_bytes(c->latent);
}

static float scale_of(const call *c, const uint8_t *record, int which) {
    const uint8_t *scales = matrix_of(c, record, DOWN) + (size_t)c->latent * row_bytes(c->width);
    float scale;
    memcpy(&scale, scales + (size_t)which * sizeof scale, sizeof scale);
    return scale;
}

/* sums[t * stride + r] = scale x row (first + r) of the matrix times input t. */
static void block_dots(const uint8_t *matrix, int64_t columns, float scale, int64_t first,
                       int64_t rows, const block_q8_0 *inputs, int64_t tokens, float *sums,
                       int64_t stride) {
    for (int64_t r0 = 0; r0 < rows; r0 += BLOCK_ROWS)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t r = r0; r < least(r0 + BLOCK_ROWS, rows); r++) {
                float sum;
                ggml_vec_dot_nvfp4_q8_0((int)columns, &sum, 0,
                                        matrix + (size_t)(first + r) * row_bytes(columns), 0,
                                        inputs + t * (columns / QK8_0), 0, 1);
                sums[t * stride + r] = sum * scale;
            }
}

static void hidden_rows(const call *c, int64_t expert, int64_t unit) {
    const uint8_t *record = c->records + c->experts[expert] * c->stride_bytes;
    const int64_t first = unit * UNIT_ROWS;
    float g[BLOCK_TOKENS][UNIT_ROWS], u[BLOCK_TOKENS][UNIT_ROWS], h[UNIT_ROWS];
    for (int64_t t0 = 0; t0 < c->n_tokens; t0 += BLOCK_TOKENS) {
        const int64_t tokens = least(c->n_tokens - t0, BLOCK_TOKENS);
        const block_q8_0 *x = c->x_q8 + t0 * (c->latent / QK8_0);
        block_dots(matrix_of(c, record, GATE), c->latent, scale_of(c, record, GATE), first,
                   UNIT_ROWS, x, tokens, g[0], UNIT_ROWS);
        block_dots(matrix_of(c, record, UP), c->latent, scale_of(c, record, UP), first, UNIT_ROWS, x,
                   tokens, u[0], UNIT_ROWS);
        for (int64_t t = 0; t < tokens; t++) {
            const int64_t pair = expert * c->n_tokens + t0 + t;
            ggml_vec_swiglu_f32(UNIT_ROWS, h, g[t], u[t]);
            quantize_row_q8_0(h, c->h_q8 + (pair * c->width + first) / QK8_0, UNIT_ROWS);
        }
    }
}

static void output_rows(const call *c, int64_t expert, int64_t unit) {
    const uint8_t *record = c->records + c->experts[expert] * c->stride_bytes;
    const int64_t first = unit * UNIT_ROWS;
    for (int64_t t0 = 0; t0 < c->n_tokens; t0 += BLOCK_TOKENS) {
        const int64_t pair = expert * c->n_tokens + t0;
        block_dots(matrix_of(c, record, DOWN), c->width, scale_of(c, record, DOWN), first, UNIT_ROWS,
                   c->h_q8 + pair * (c->width / QK8_0), least(c->n_tokens - t0, BLOCK_TOKENS),
                   c->out + pair * c->latent + first, c->latent);
    }
}

static void run_unit(void *context, int phase, int64_t unit) {
    const call *c = context;
    const int64_t hidden_units = c->width / UNIT_ROWS, output_units = c->latent / UNIT_ROWS;
    switch (phase) {
    case PACK:
        quantize_row_q8_0(c->x + unit * c->latent, c->x_q8 + unit * (c->latent / QK8_0), c->latent);
        break;
    case HIDDEN: hidden_rows(c, unit / hidden_units, unit % hidden_units); break;
    case OUTPUT: output_rows(c, unit / output_units, unit % output_units); break;
    }
}

/* Fills the tables; before anything else. */
EXPORTED void k3_ggml_init(void) {
    for (int i = 0; i < 1 << 16; i++)
        ggml_table_f32_f16[i] = GGML_COMPUTE_FP16_TO_FP32((ggml_fp16_t)i);
    for (int i = 0; i < 1 << 8; i++) {
        ggml_table_f32_e8m0_half[i] = GGML_E8M0_TO_FP32_HALF((uint8_t)i);
        ggml_table_f32_ue4m3[i] = ggml_ue4m3_to_fp32((uint8_t)i);
    }
}

EXPORTED k3_pool *k3_ggml_open(int32_t threads) { return k3_pool_open(threads, NULL, 0, 0); }

EXPORTED void k3_ggml_close(k3_pool *pool) { k3_pool_close(pool); }

/* Bytes of scratch memory that a call needs. */
EXPORTED int64_t k3_ggml_scratch_bytes(int64_t latent, int64_t width, int64_t n_experts,
                                       int64_t n_tokens) {
    return n_tokens * (latent + n_experts * width) / QK8_0 * (int64_t)sizeof(block_q8_0);
}

/* Rows float32 [experts][tokens][latent] of every token for every expert. Sizes are multiples of 64;
 * the caller has checked indices and buffers. */
EXPORTED void k3_ggml_rows(k3_pool *pool, int64_t latent, int64_t width, int64_t stride_bytes,
                           const uint8_t *records, const int32_t *experts, int64_t n_experts,
                           const float *x, int64_t n_tokens, void *scratch, float *out) {
    call c = {.latent = latent, .width = width, .stride_bytes = stride_bytes, .records = records,
              .experts = experts, .x = x, .out = out, .n_experts = n_experts, .n_tokens = n_tokens};
    c.x_q8 = scratch;
    c.h_q8 = c.x_q8 + n_tokens * (latent / QK8_0);
    const k3_job job = {.unit = run_unit,
                        .context = &c,
                        .phases = PHASES,
                        .units = {n_tokens, n_experts * (width / UNIT_ROWS),
                                  n_experts * (latent / UNIT_ROWS)}};
    k3_pool_run(pool, &job);
}
