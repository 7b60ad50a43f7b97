/* Fused training kernels of the demo model: what a training step in plain torch spends its time on.
 *
 * Owns arithmetic on caller-allocated, contiguous buffers; knows nothing of torch or files. The
 * formulas are those of operations.py, which stays the readable reference; tests hold the two
 * together. One call uses one thread. Built by native.py with -O3 -march=native -ffast-math, so the
 * inner loops are left to the compiler to vectorise.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define WIDTH 64 /* KDA head width: fixed, so that the compiler keeps whole rows in registers */
#define SPAN 16  /* tokens between two stored states: the backward pass recomputes the others */

typedef uint16_t bf16;

static inline float widen(bf16 x) {
    union { uint32_t bits; float value; } c = {(uint32_t)x << 16};
    return c.value;
}

static inline bf16 narrow(float x) { /* to nearest, ties to even; finite input */
    union { float value; uint32_t bits; } c = {x};
    return (bf16)((c.bits + 0x7fff + ((c.bits >> 16) & 1)) >> 16);
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

/* Kimi Delta Attention: q, k, v, log_decay, out [B, T, heads, WIDTH], beta [B, T, heads] */

typedef struct { float s[WIDTH][WIDTH]; } State; /* [key channel][value channel] */

/* S <- exp(g) S; u = beta (v - k^T S); S <- S + k u; out = q^T S (skipped when out is null). */
static void advance(State *state, const float *q, const float *k, const float *v, const float *g,
                    float beta, float *out) {
    float read[WIDTH] = {0}, write[WIDTH], result[WIDTH] = {0}, decay[WIDTH];
    for (int i = 0; i < WIDTH; i++) decay[i] = expf(g[i]);
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) {
            float s = state->s[i][j] * decay[i];
            state->s[i][j] = s;
            read[j] += k[i] * s;
        }
    for (int j = 0; j < WIDTH; j++) write[j] = beta * (v[j] - read[j]);
    if (!out) {
        for (int i = 0; i < WIDTH; i++)
            for (int j = 0; j < WIDTH; j++) state->s[i][j] += k[i] * write[j];
        return;
    }
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) {
            float s = state->s[i][j] + k[i] * write[j];
            state->s[i][j] = s;
            result[j] += q[i] * s;
        }
    memcpy(out, result, sizeof result);
}

/* states [B, heads, ceil(T / SPAN), WIDTH, WIDTH] receives the state before every SPAN-th token. */
void delta_rule_forward(int64_t rows, int64_t tokens, int64_t heads, const float *q, const float *k,
                        const float *v, const float *g, const float *beta, float *out,
                        State *states) {
    int64_t spans = (tokens + SPAN - 1) / SPAN;
    for (int64_t lane = 0; lane < rows * heads; lane++) {
        int64_t row = lane / heads, head = lane % heads;
        State state = {{{0}}};
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = (row * tokens + t) * heads + head, x = at * WIDTH;
            if (t % SPAN == 0) states[lane * spans + t / SPAN] = state;
            advance(&state, q + x, k + x, v + x, g + x, beta[at], out + x);
        }
    }
}

typedef struct { float *q, *k, *v, *g, *beta; } Gradients;

/* One token backwards. before = S at the token's start, flow = dL/dS after it on entry and
 * before it on exit. */
static void retreat(State *before, State *flow, const float *q, const float *k, const float *v,
                    const float *g, float beta, const float *dout, Gradients d) {
    float read[WIDTH] = {0}, fresh[WIDTH], write[WIDTH], decay[WIDTH];
    float dwrite[WIDTH] = {0}, dread[WIDTH];
    for (int i = 0; i < WIDTH; i++) decay[i] = expf(g[i]);
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < WIDTH; j++) {
            float s = before->s[i][j] * decay[i];
            before->s[i][j] = s; /* from here on: the decayed state */
            read[j] += k[i] * s;
        }
    float along = 0, rate = 0;
    for (int j = 0; j < WIDTH; j++) {
        fresh[j] = v[j] - read[j];
        write[j] = beta * fresh[j];
        along += write[j] * dout[j];
    }
    for (int i = 0; i < WIDTH; i++) {
        float dot = 0;
        for (int j = 0; j < WIDTH; j++) {
            float f = flow->s[i][j] + q[i] * dout[j];
            flow->s[i][j] = f;
            dwrite[j] += k[i] * f;
            dot += before->s[i][j] * dout[j];
        }
        d.q[i] = dot + k[i] * along;
    }
    for (int j = 0; j < WIDTH; j++) {
        rate += dwrite[j] * fresh[j];
        d.v[j] = beta * dwrite[j];
        dread[j] = -beta * dwrite[j];
    }
    *d.beta = rate;
    for (int i = 0; i < WIDTH; i++) {
        float key = 0, forget = 0;
        for (int j = 0; j < WIDTH; j++) {
            float f = flow->s[i][j], s = before->s[i][j], total = f + k[i] * dread[j];
            key += f * write[j] + s * dread[j];
            forget += total * s;
            flow->s[i][j] = decay[i] * total;
        }
        d.k[i] = key;
        d.g[i] = forget;
    }
}

void delta_rule_backward(int64_t rows, int64_t tokens, int64_t heads, const float *q,
                         const float *k, const float *v, const float *g, const float *beta,
                         const State *states, const float *dout, float *dq, float *dk, float *dv,
                         float *dg, float *dbeta) {
    int64_t spans = (tokens + SPAN - 1) / SPAN;
    State replay[SPAN]; /* 256 KiB of stack: stays in the second-level cache */
    for (int64_t lane = 0; lane < rows * heads; lane++) {
        int64_t row = lane / heads, head = lane % heads;
        State flow = {{{0}}};
        for (int64_t span = spans - 1; span >= 0; span--) {
            int64_t first = span * SPAN, end = first + SPAN < tokens ? first + SPAN : tokens;
            replay[0] = states[lane * spans + span];
            for (int64_t t = first; t + 1 < end; t++) {
                int64_t at = (row * tokens + t) * heads + head, x = at * WIDTH;
                replay[t - first + 1] = replay[t - first];
                advance(&replay[t - first + 1], 0, k + x, v + x, g + x, beta[at], 0);
            }
            for (int64_t t = end - 1; t >= first; t--) {
                int64_t at = (row * tokens + t) * heads + head, x = at * WIDTH;
                Gradients d = {dq + x, dk + x, dv + x, dg + x, dbeta + at};
                State *before = &replay[t - first];
                retreat(before, &flow, q + x, k + x, v + x, g + x, beta[at], dout + x, d);
            }
        }
    }
}

/* Causal depthwise convolution, then SiLU: x, mixed, out [B, T, C] float, weight [taps, C] */

void convolution_forward(int64_t rows, int64_t tokens, int64_t channels, int64_t taps,
                         const float *x, const float *weight, float *mixed, float *out) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = (row * tokens + t) * channels;
            float *m = mixed + at;
            memset(m, 0, channels * sizeof *m);
            for (int64_t back = 0; back < taps && back <= t; back++) {
                const float *w = weight + (taps - 1 - back) * channels;
                const float *source = x + at - back * channels;
                for (int64_t c = 0; c < channels; c++) m[c] += w[c] * source[c];
            }
            for (int64_t c = 0; c < channels; c++) out[at + c] = m[c] * sigmoid(m[c]);
        }
}

/* dx and dweight are overwritten; scratch [B, T, C] receives the gradient before SiLU. */
void convolution_backward(int64_t rows, int64_t tokens, int64_t channels, int64_t taps,
                          const float *x, const float *weight, const float *mixed,
                          const float *dout, float *scratch, float *dx, float *dweight) {
    memset(dweight, 0, taps * channels * sizeof *dweight);
    memset(dx, 0, rows * tokens * channels * sizeof *dx);
    for (int64_t i = 0; i < rows * tokens * channels; i++) {
        float m = mixed[i], s = sigmoid(m);
        scratch[i] = dout[i] * s * (1.0f + m * (1.0f - s));
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t t = 0; t < tokens; t++) {
            int64_t at = (row * tokens + t) * channels;
            for (int64_t back = 0; back < taps && back <= t; back++) {
                const float *m = scratch + at, *w = weight + (taps - 1 - back) * channels;
                const float *source = x + at - back * channels;
                float *dw = dweight + (taps - 1 - back) * channels, *d = dx + at - back * channels;
                for (int64_t c = 0; c < channels; c++) {
                    d[c] += w[c] * m[c];
                    dw[c] += source[c] * m[c];
                }
            }
        }
}

/* Experts: one compartment of `room` rows per expert; places[n * K + k] is a row number */

void expert_places(int64_t pairs, int64_t experts, int64_t room, const int64_t *ids, int64_t *next,
                   int64_t *places) {
    for (int64_t e = 0; e < experts; e++) next[e] = e * room;
    for (int64_t p = 0; p < pairs; p++) places[p] = next[ids[p]]++;
}

/* out [experts * room, L] <- z [N, L]; rows past an expert's load are zeroed, because gradients
 * sum over whole compartments. */
void expert_spread(int64_t tokens, int64_t slots, int64_t width, int64_t experts, int64_t room,
                   const int64_t *loads, const int64_t *places, const bf16 *z, bf16 *out) {
    for (int64_t e = 0; e < experts; e++)
        memset(out + (e * room + loads[e]) * width, 0, (room - loads[e]) * width * sizeof *out);
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t s = 0; s < slots; s++)
            memcpy(out + places[n * slots + s] * width, z + n * width, width * sizeof *out);
}

/* out [N, L] <- the sum of each token's rows. */
void expert_gather(int64_t tokens, int64_t slots, int64_t width, const int64_t *places,
                   const bf16 *rows, bf16 *out) {
    float sum[width];
    for (int64_t n = 0; n < tokens; n++) {
        memset(sum, 0, sizeof sum);
        for (int64_t s = 0; s < slots; s++) {
            const bf16 *row = rows + places[n * slots + s] * width;
            for (int64_t c = 0; c < width; c++) sum[c] += widen(row[c]);
        }
        for (int64_t c = 0; c < width; c++) out[n * width + c] = narrow(sum[c]);
    }
}

/* out [N, L] float <- sum over slots, in order, of weight * row. */
void expert_combine(int64_t tokens, int64_t slots, int64_t width, const int64_t *places,
                    const bf16 *rows, const float *weights, float *out) {
    for (int64_t n = 0; n < tokens; n++) {
        float *sum = out + n * width;
        memset(sum, 0, width * sizeof *sum);
        for (int64_t s = 0; s < slots; s++) {
            const bf16 *row = rows + places[n * slots + s] * width;
            float weight = weights[n * slots + s];
            for (int64_t c = 0; c < width; c++) sum[c] += weight * widen(row[c]);
        }
    }
}

void expert_combine_backward(int64_t tokens, int64_t slots, int64_t width, int64_t experts,
                             int64_t room, const int64_t *loads, const int64_t *places,
                             const bf16 *rows, const float *weights, const float *dout, bf16 *drows,
                             float *dweights) {
    for (int64_t e = 0; e < experts; e++)
        memset(drows + (e * room + loads[e]) * width, 0, (room - loads[e]) * width * sizeof *drows);
    for (int64_t n = 0; n < tokens; n++)
        for (int64_t s = 0; s < slots; s++) {
            const bf16 *row = rows + places[n * slots + s] * width;
            bf16 *d = drows + places[n * slots + s] * width;
            const float *gradient = dout + n * width;
            float weight = weights[n * slots + s], dot = 0;
            for (int64_t c = 0; c < width; c++) {
                dot += gradient[c] * widen(row[c]);
                d[c] = narrow(weight * gradient[c]);
            }
            dweights[n * slots + s] = dot;
        }
}

/* SiTU over fused [gate | up] rows of 2 I: the first loads[e] of a compartment, the rest zeroed */

void expert_situ(int64_t experts, int64_t room, int64_t inner, float beta, float linear_beta,
                 const int64_t *loads, const bf16 *fused, bf16 *out) {
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t r = e * room; r < e * room + loads[e]; r++)
            for (int64_t c = 0; c < inner; c++) {
                float g = widen(fused[r * 2 * inner + c]);
                float u = widen(fused[r * 2 * inner + inner + c]);
                float tanh_g = 2.0f * sigmoid(2.0f / beta * g) - 1.0f;
                float tanh_u = 2.0f * sigmoid(2.0f / linear_beta * u) - 1.0f;
                out[r * inner + c] = narrow(beta * tanh_g * sigmoid(g) * linear_beta * tanh_u);
            }
        memset(out + (e * room + loads[e]) * inner, 0, (room - loads[e]) * inner * sizeof *out);
    }
}

void expert_situ_backward(int64_t experts, int64_t room, int64_t inner, float beta,
                          float linear_beta, const int64_t *loads, const bf16 *fused,
                          const bf16 *dout, bf16 *dfused) {
    for (int64_t e = 0; e < experts; e++) {
        for (int64_t r = e * room; r < e * room + loads[e]; r++)
            for (int64_t c = 0; c < inner; c++) {
                float g = widen(fused[r * 2 * inner + c]);
                float u = widen(fused[r * 2 * inner + inner + c]);
                float d = widen(dout[r * inner + c]), s = sigmoid(g);
                float tanh_g = 2.0f * sigmoid(2.0f / beta * g) - 1.0f;
                float tanh_u = 2.0f * sigmoid(2.0f / linear_beta * u) - 1.0f;
                float slope = (1.0f - tanh_g * tanh_g) * s + beta * tanh_g * s * (1.0f - s);
                dfused[r * 2 * inner + c] = narrow(d * slope * linear_beta * tanh_u);
                float line = beta * tanh_g * s * (1.0f - tanh_u * tanh_u);
                dfused[r * 2 * inner + inner + c] = narrow(d * line);
            }
        bf16 *rest = dfused + (e * room + loads[e]) * 2 * inner;
        memset(rest, 0, (room - loads[e]) * 2 * inner * sizeof *rest);
    }
}

/* The optimiser: one pass over a slice */

/* mean <- (first + second) / 2; returns the sum of squares of the result. */
double gradient_mean(int64_t count, float *restrict mean, const bf16 *restrict first,
                     const bf16 *restrict second) {
    double total = 0;
    for (int64_t block = 0; block < count; block += 4096) {
        int64_t end = block + 4096 < count ? block + 4096 : count;
        float sum = 0;
        for (int64_t i = block; i < end; i++) {
            float g = 0.5f * (widen(first[i]) + widen(second[i]));
            mean[i] = g;
            sum += g * g;
        }
        total += sum;
    }
    return total;
}

typedef struct {
    float clip, rate, momentum, memory, eps, decay, momentum_correction, memory_correction;
} AdamStep;

/* AdamW; working receives the bf16 copy of the masters that the next forward pass multiplies. */
void adamw(int64_t count, AdamStep step, const float *restrict gradient, float *restrict master,
           float *restrict mean, float *restrict square, bf16 *restrict working) {
    for (int64_t i = 0; i < count; i++) {
        float g = gradient[i] * step.clip;
        mean[i] = step.momentum * mean[i] + (1.0f - step.momentum) * g;
        square[i] = step.memory * square[i] + (1.0f - step.memory) * g * g;
        float scale = sqrtf(square[i] * step.memory_correction) + step.eps;
        float move = mean[i] * step.momentum_correction / scale;
        float value = master[i] * (1.0f - step.rate * step.decay) - step.rate * move;
        master[i] = value;
        working[i] = narrow(value);
    }
}
