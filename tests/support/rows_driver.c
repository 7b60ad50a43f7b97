/* Computes the rows of cases that it reads, by every back end of kernel "int16" that it can run, and
 * writes them; status 2 when two back ends differ. Lets the tests run the kernels under sanitisers
 * and for a processor that is not this one.
 *
 *   driver < cases > rows      a case: layout, n_rows, pairs, n_tokens, threads as int64; then
 *                              arena, bank rows, tokens and activations, each exactly as long as said
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rows.h"

typedef struct {
    k3_expert_layout layout;
    int64_t n_rows, pairs, n_tokens, threads;
} head;

/* Memory of its own for every array: a sanitiser sees a read beyond any of them. */
static void *read_array(int64_t bytes) {
    void *array = malloc((size_t)bytes);
    if (!array || fread(array, 1, (size_t)bytes, stdin) != (size_t)bytes)
        exit(3);
    return array;
}

static void run_case(const head *h) {
    uint8_t *arena = read_array(h->n_rows * h->layout.stride_bytes);
    int32_t *bank_rows = read_array(h->pairs * 4), *tokens = read_array(h->pairs * 4);
    uint16_t *activations = read_array(h->n_tokens * h->layout.latent * 2);
    const size_t bytes = (size_t)(h->pairs * h->layout.latent * 2);
    uint16_t *rows = NULL, *first = NULL;
    k3_pool *pool = k3_pool_open((int32_t)h->threads, NULL, 0, 0);
    for (int32_t backend = 0; k3_backend_kernel(backend); backend++) {
        if (!k3_backend_usable(backend))
            continue;
        rows = malloc(bytes);
        if (!pool || !rows ||
            k3_rows(backend, pool, &h->layout, arena, h->n_rows, bank_rows, tokens, h->pairs,
                    activations, h->n_tokens, rows, NULL))
            exit(4);
        if (strcmp(k3_backend_kernel(backend), "int16") == 0) {
            if (first && memcmp(first, rows, bytes))
                exit(2);
            fprintf(stderr, "%s ", k3_backend_isa(backend));
            if (!first) {
                first = rows;
                continue;
            }
        }
        free(rows);
    }
    fwrite(first, 1, bytes, stdout);
    k3_pool_close(pool);
    free(first);
    free(arena);
    free(bank_rows);
    free(tokens);
    free(activations);
}

int main(void) {
    head h;
    while (fread(&h, sizeof h, 1, stdin) == 1)
        run_case(&h);
    return 0;
}
