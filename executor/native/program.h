/* A compiled model as the layer loop needs it. Private memory of a worker; executor/program.py fills it from the manifest. */
#ifndef GANGWAY_PROGRAM_H
#define GANGWAY_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum space { SPACE_WEIGHTS, SPACE_ARENA, SPACE_INPUT, SPACE_OUTPUT, SPACES };

typedef void (*kernel)(void); /* void k(void *a0, ..., void *aN, [const int64_t *batch,] int32_t begin, int32_t end) */

struct argument {
    uint32_t space, index;
    uint64_t offset;
};

/* Computes up to `rows` rows in a call, `tasks` tasks for all of them together. */
struct implementation {
    kernel run;
    uint32_t tasks;
    uint32_t chunk; /* largest claim */
    uint32_t rows;
};

struct version {
    struct implementation one;   /* of one row, and without the argument `batch` */
    struct implementation batch; /* of queries of two rows and more; run NULL: there is none */
};

struct layer {
    uint32_t argument_count, version_count;
    uint32_t max_ranks; /* of one row */
    uint32_t row_ns;    /* estimate for each further row */
    struct argument arguments[MAX_ARGUMENTS];
    struct version versions[MAX_VERSIONS];
};

struct query;
/* Computes a query in one call, in place of kernels, from one block with all inputs to one with all outputs: frames, which say themselves
 * what is in them (executor/frames.py). Their sizes stand in the request's slot. False: the query has failed. */
typedef bool (*whole_call)(void *context, const struct query *query);

struct program {
    uint32_t layer_count, input_count, output_count;
    uint64_t arena_bytes; /* of one row */
    uint64_t input_row_bytes[MAX_TENSORS], output_row_bytes[MAX_TENSORS];
    char *weights; /* mapped read-only */
    size_t weights_bytes;
    void *library; /* of dlopen */
    struct layer *layers;
    whole_call whole; /* NULL: kernels. Otherwise there is one layer, with one task for all rows, and no kernel */
    void *context;    /* of `whole` */
};

static inline bool is_batch(const struct version *version, uint32_t rows) { return rows > 1 && version->batch.run; }

/* How many calls' worth of rows a query has: tasks are numbered group by group. */
static inline uint32_t row_groups(const struct version *version, uint32_t rows) {
    return is_batch(version, rows) ? (rows + version->batch.rows - 1) / version->batch.rows : rows;
}

/* Opens kernels and weights. Returns NULL, or what went wrong (valid until the next call); `program_close` is needed in both cases. */
const char *program_open(struct program *program, const char *kernels, const char *weights);
void program_close(struct program *program);

#endif
