/* See rows.h. A call runs in waves of at most WAVE pairs, a wave in three phases: pack the activations
 * (first wave only), then w1, w3 and SiTU, then w2. A unit is a range of rows of one expert for the
 * tokens that share it: one expert and one token keep all threads busy, and each weight is read once
 * per tile of tokens. */
#include "rows.h"

#include "backend.h"

#include <stdlib.h>
#include <string.h>

enum {
    WAVE = 128,         /* pairs whose packed hidden rows exist at a time */
    OUTPUT_ROWS = 64,   /* rows of w2 in a unit */
    PROBE_BYTES = 1 << 20,
    ALONE_BYTES = 1 << 16, /* of weights: a call this small ends before a sleeper wakes up */
    ALIGNMENT = 64,
};

enum { W1, W3, W2 };
enum { PACK, HIDDEN, OUTPUT, PHASES };

static const k3_backend *const BACKENDS[] = {
#if defined(__x86_64__)
    &k3_bf16_avx512, &k3_int16_avx512, &k3_int16_avxvnni, &k3_int16_avx2,
#elif defined(__aarch64__)
    &k3_int16_neon,
#endif
    &k3_int16_portable,
};
enum { N_BACKENDS = sizeof BACKENDS / sizeof BACKENDS[0] };

static int is_backend(int32_t backend) { return backend >= 0 && backend < N_BACKENDS; }

const char *k3_backend_kernel(int32_t backend) {
    return is_backend(backend) ? BACKENDS[backend]->kernel : NULL;
}

const char *k3_backend_isa(int32_t backend) {
    return is_backend(backend) ? BACKENDS[backend]->isa : NULL;
}

int32_t k3_backend_usable(int32_t backend) {
    return is_backend(backend) && BACKENDS[backend]->usable();
}

void k3_backend_situ(int32_t backend, const float *g, const float *u, float *h, int64_t n) {
    BACKENDS[backend]->situ(g, u, 1.0f, 1.0f, h, n);
}

/* Pairs of one expert whose tokens share a reading of it. */
typedef struct {
    int64_t first; /* key of the wave */
    int64_t n;     /* 1 .. TILE */
    const uint8_t *record;
} tile;

typedef struct {
    const k3_backend *backend;
    const k3_expert_layout *layout;
    const int32_t *tokens;
    const uint16_t *activations;
    uint16_t *out;
    float *out_f32;
    int64_t x_chunks, h_chunks; /* chunks of an activation, of a hidden row */
    uint8_t *x_values, *h_values;
    float *x_scales, *h_scales;
    uint8_t *is_used;      /* [n_tokens]: some pair has this token */
    uint64_t *keys;        /* bank row above pair, sorted */
    const uint64_t *wave;  /* the keys in work */
    tile *tiles;           /* of the wave */
    int64_t n_tokens, hidden_units, output_units; /* units per tile */
} call;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t parts(int64_t all, int64_t part) { return (all + part - 1) / part; }

static int64_t pair_of(uint64_t key) { return (int64_t)(key & UINT32_MAX); }

/* A scale_2, or NaN when it has a sign or is no number: SiTU would hide an infinite one. */
static float scale_2_at(const uint8_t *p) {
    uint32_t bits;
    float f;
    memcpy(&bits, p, sizeof bits);
    if (bits >= 0x7f800000 && bits != 0x80000000)
        bits = 0x7fc00000;
    memcpy(&f, &bits, sizeof f);
    return f;
}

/* ---- units ---- */

static k3_matrix matrix_of(const call *c, const tile *t, int which) {
    const k3_expert_layout *l = c->layout;
    return (k3_matrix){t->record + l->weight[which], t->record + l->scale[which],
                       which == W2 ? l->width : l->latent, l->interleaved != 0};
}

static float scale_2_of(const call *c, const tile *t, int which) {
    return scale_2_at(t->record + c->layout->scale_2[which]);
}

/* Packs the activation of one token. */
static void pack_token(const call *c, int64_t token) {
    if (!c->is_used[token])
        return;
    const uint16_t *bits = c->activations + token * c->layout->latent;
    for (int64_t chunk = 0; chunk < c->x_chunks; chunk++) {
        float values[CHUNK] = {0};
        const int64_t columns = least(c->layout->latent - chunk * CHUNK, CHUNK);
        for (int64_t i = 0; i < columns; i++) {
            const uint32_t word = (uint32_t)bits[chunk * CHUNK + i] << 16;
            memcpy(&values[i], &word, sizeof word);
        }
        const int64_t place = token * c->x_chunks + chunk;
        c->x_scales[place] = c->backend->pack(values, c->x_values + place * INPUT_CHUNK_BYTES);
    }
}

/* One chunk of h = SiTU(W1 x, W3 x), packed for w2, for the tokens of a tile. */
static void hidden_rows(const call *c, const tile *t, int64_t chunk) {
    const k3_matrix w1 = matrix_of(c, t, W1), w3 = matrix_of(c, t, W3);
    const float scale_g = scale_2_of(c, t, W1), scale_u = scale_2_of(c, t, W3);
    const int64_t rows = least(c->layout->width - chunk * CHUNK, CHUNK);
    float g[TILE][CHUNK], u[TILE][CHUNK];
    k3_input inputs[TILE];
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t place = c->tokens[pair_of(c->wave[t->first + i])] * c->x_chunks;
        inputs[i] = (k3_input){c->x_values + place * INPUT_CHUNK_BYTES, c->x_scales + place};
    }
    c->backend->dots(&w1, chunk * CHUNK, rows, inputs, t->n, g[0], CHUNK);
    c->backend->dots(&w3, chunk * CHUNK, rows, inputs, t->n, u[0], CHUNK);
    for (int64_t i = 0; i < t->n; i++) {
        float h[CHUNK] = {0};
        c->backend->situ(g[i], u[i], scale_g, scale_u, h, rows);
        const int64_t place = (t->first + i) * c->h_chunks + chunk;
        c->h_scales[place] = c->backend->pack(h, c->h_values + place * INPUT_CHUNK_BYTES);
    }
}

/* Some elements of the rows W2 h, for the pairs of a tile. */
static void output_rows(const call *c, const tile *t, int64_t unit) {
    const k3_matrix w2 = matrix_of(c, t, W2);
    const float scale_y = scale_2_of(c, t, W2);
    const int64_t latent = c->layout->latent, first = unit * OUTPUT_ROWS;
    const int64_t rows = least(latent - first, OUTPUT_ROWS);
    float y[TILE][OUTPUT_ROWS];
    k3_input inputs[TILE];
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t place = (t->first + i) * c->h_chunks;
        inputs[i] = (k3_input){c->h_values + place * INPUT_CHUNK_BYTES, c->h_scales + place};
    }
    c->backend->dots(&w2, first, rows, inputs, t->n, y[0], OUTPUT_ROWS);
    for (int64_t i = 0; i < t->n; i++) {
        const int64_t place = pair_of(c->wave[t->first + i]) * latent + first;
        for (int64_t j = 0; j < rows; j++)
            y[i][j] *= scale_y;
        if (c->out)
            c->backend->round(y[i], c->out + place, rows);
        else
            memcpy(c->out_f32 + place, y[i], (size_t)rows * sizeof y[i][0]);
    }
}

static void run_unit(void *context, int phase, int64_t unit) {
    const call *c = context;
    switch (phase) {
    case PACK: pack_token(c, unit); break;
    case HIDDEN:
        hidden_rows(c, &c->tiles[unit / c->hidden_units], unit % c->hidden_units);
        break;
    case OUTPUT:
        output_rows(c, &c->tiles[unit / c->output_units], unit % c->output_units);
        break;
    }
}

/* ---- a call ---- */

static int by_key(const void *a, const void *b) {
    const uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x > y) - (x < y);
}

static int64_t first_out_of_range(int64_t n_rows, const int32_t *bank_rows, int64_t n_tokens,
                                  const int32_t *tokens, int64_t pairs) {
    for (int64_t p = 0; p < pairs; p++) {
        if (bank_rows[p] < -1 || bank_rows[p] >= n_rows)
            return 1 + p;
        if (tokens[p] < 0 || tokens[p] >= n_tokens)
            return -(1 + p);
    }
    return 0;
}

static int overlap(const void *a, int64_t a_bytes, const void *b, int64_t b_bytes) {
    const uintptr_t first = (uintptr_t)a, second = (uintptr_t)b;
    return first < second + (uintptr_t)b_bytes && second < first + (uintptr_t)a_bytes;
}

/* Whether rows would be written over something that is still to be read. */
static int overwrites(const call *c, const uint8_t *arena, int64_t n_rows,
                      const int32_t *bank_rows, int64_t pairs) {
    const int64_t word = (int64_t)sizeof *bank_rows, latent = c->layout->latent;
    const void *out = c->out ? (const void *)c->out : (const void *)c->out_f32;
    const int64_t bytes = pairs * latent * (c->out ? 2 : 4);
    return overlap(out, bytes, arena, n_rows * c->layout->stride_bytes) ||
           overlap(out, bytes, c->activations, c->n_tokens * latent * 2) ||
           overlap(out, bytes, bank_rows, pairs * word) ||
           overlap(out, bytes, c->tokens, pairs * word);
}

/* Zeros the rows of masked pairs and sorts the others by expert; returns how many there are. */
static int64_t sort_pairs(call *c, const int32_t *bank_rows, int64_t pairs) {
    const int64_t latent = c->layout->latent;
    int64_t n = 0;
    for (int64_t p = 0; p < pairs; p++) {
        if (bank_rows[p] >= 0) {
            c->keys[n++] = (uint64_t)bank_rows[p] << 32 | (uint64_t)p;
            c->is_used[c->tokens[p]] = 1;
        } else if (c->out) {
            memset(c->out + p * latent, 0, (size_t)latent * sizeof *c->out);
        } else {
            memset(c->out_f32 + p * latent, 0, (size_t)latent * sizeof *c->out_f32);
        }
    }
    qsort(c->keys, (size_t)n, sizeof *c->keys, by_key);
    return n;
}

/* Cuts the n keys of a wave into tiles; returns how many. */
static int64_t cut_tiles(call *c, int64_t n, const uint8_t *arena) {
    int64_t tiles = 0;
    for (int64_t first = 0, used; first < n; first += used) {
        const uint64_t row = c->wave[first] >> 32;
        for (used = 1; used < TILE && first + used < n && c->wave[first + used] >> 32 == row;)
            used++;
        c->tiles[tiles++] = (tile){first, used, arena + (int64_t)row * c->layout->stride_bytes};
    }
    return tiles;
}

static void run_waves(call *c, k3_pool *pool, int64_t n, const uint8_t *arena) {
    c->hidden_units = c->h_chunks;
    c->output_units = parts(c->layout->latent, OUTPUT_ROWS);
    for (int64_t first = 0; first < n; first += WAVE) {
        c->wave = c->keys + first;
        const int64_t tiles = cut_tiles(c, least(n - first, WAVE), arena);
        const k3_job job = {
            .unit = run_unit,
            .context = c,
            .phases = PHASES,
            .units = {first ? 0 : c->n_tokens, tiles * c->hidden_units, tiles * c->output_units},
        };
        const int small = tiles * c->layout->latent * c->layout->width * 3 / 2 < ALONE_BYTES;
        k3_pool_run(small ? NULL : pool, &job);
    }
}

/* Takes `bytes` of a block of memory, up to a multiple of ALIGNMENT; counts when there is no block. */
static void *take(uint8_t *block, int64_t *used, int64_t bytes) {
    void *piece = block ? block + *used : NULL;
    *used += parts(bytes, ALIGNMENT) * ALIGNMENT;
    return piece;
}

/* Places the scratch memory of a call in a block; returns its size. */
static int64_t place_scratch(call *c, uint8_t *block, int64_t pairs) {
    const int64_t wave = least(pairs, WAVE), word = (int64_t)sizeof(float);
    int64_t used = 0;
    c->x_values = take(block, &used, c->n_tokens * c->x_chunks * INPUT_CHUNK_BYTES);
    c->h_values = take(block, &used, wave * c->h_chunks * INPUT_CHUNK_BYTES);
    c->x_scales = take(block, &used, c->n_tokens * c->x_chunks * word);
    c->h_scales = take(block, &used, wave * c->h_chunks * word);
    c->keys = take(block, &used, pairs * (int64_t)sizeof *c->keys);
    c->tiles = take(block, &used, wave * (int64_t)sizeof *c->tiles);
    c->is_used = take(block, &used, c->n_tokens);
    return used;
}

int64_t k3_rows(int32_t backend, k3_pool *pool, const k3_expert_layout *layout,
                const uint8_t *arena, int64_t n_rows, const int32_t *bank_rows,
                const int32_t *tokens, int64_t pairs, const uint16_t *activations,
                int64_t n_tokens, uint16_t *out, float *out_f32) {
    const int64_t wrong = first_out_of_range(n_rows, bank_rows, n_tokens, tokens, pairs);
    if (wrong || pairs == 0)
        return wrong;
    call c = {
        .backend = BACKENDS[backend],
        .layout = layout,
        .tokens = tokens,
        .activations = activations,
        .out = out,
        .out_f32 = out_f32,
        .x_chunks = parts(layout->latent, CHUNK),
        .h_chunks = parts(layout->width, CHUNK),
        .n_tokens = n_tokens,
    };
    if (overwrites(&c, arena, n_rows, bank_rows, pairs))
        return INT64_MIN + 1;
    void *block = NULL;
    const int64_t bytes = place_scratch(&c, NULL, pairs);
    if (posix_memalign(&block, ALIGNMENT, (size_t)bytes))
        return INT64_MIN;
    place_scratch(&c, block, pairs);
    memset(c.is_used, 0, (size_t)n_tokens);
    run_waves(&c, pool, sort_pairs(&c, bank_rows, pairs), arena);
    free(block);
    return 0;
}

/* ---- the read probe ---- */

typedef struct {
    const uint8_t *memory;
    int64_t bytes;
    uint64_t (*read)(const uint8_t *memory, int64_t bytes);
    uint64_t found;
} probe;

static void probe_unit(void *context, int phase, int64_t unit) {
    (void)phase;
    probe *p = context;
    const int64_t first = unit * PROBE_BYTES;
    const uint64_t found = p->read(p->memory + first, least(p->bytes - first, PROBE_BYTES));
    __atomic_fetch_xor(&p->found, found, __ATOMIC_RELAXED);
}

uint64_t k3_read_probe(k3_pool *pool, const uint8_t *memory, int64_t bytes) {
    int32_t best = 0;
    while (!BACKENDS[best]->usable())
        best++;
    probe p = {memory, bytes, BACKENDS[best]->read, 0};
    const k3_job job = {.unit = probe_unit,
                        .context = &p,
                        .phases = 1,
                        .units = {parts(bytes, PROBE_BYTES)}};
    k3_pool_run(pool, &job);
    return p.found;
}
