/* A compiled model as the layer loop needs it. Private memory of a worker; executor/worker.py fills it from the manifest. */
#ifndef GANGWAY_PROGRAM_H
#define GANGWAY_PROGRAM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum space { SPACE_WEIGHTS, SPACE_ARENA, SPACE_INPUT, SPACE_OUTPUT, SPACES };

typedef void (*kernel)(void); /* void k(void *a0, ..., void *aN, [const int64_t *batch | int64_t *refused,] int32_t begin, int32_t end) */

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
    struct implementation batch; /* of two rows and more; run NULL: there is none */
};

struct piece;
/* Computes a row of a layer in place of a kernel, from and to memory at `arguments`, with threads on these CPUs, of which the first one is
 * the caller's. Fails the slot of the row's piece if it cannot (`slot_fail`). */
typedef void (*layer_call)(void *context, struct piece *piece, void *const *arguments, uint32_t count, const uint32_t *cpus,
                           uint32_t cpu_count);
struct query;
/* Computes a query in one call, in place of kernels, each of its pieces into one block with all outputs: a frame, which describes its own
 * contents (executor/frames.py). Fails the slot of each piece that fails (`slot_fail`). */
typedef void (*query_call)(void *context, struct query *query);

struct layer {
    uint32_t argument_count, version_count;
    uint32_t max_ranks; /* of one row */
    uint32_t row_ns;    /* estimate for each further row */
    bool flushes_subnormals;
    struct argument arguments[MAX_OPERANDS];
    struct version versions[MAX_VERSIONS];
    /* Numbers that its kernels refuse, as texts in which the first {} stands for the number. If there are any, the kernels take one more
     * pointer, the last one, to two words: which check a number has failed, from 1 on, and the number. Such a layer has no batch kernel. */
    uint32_t check_count;
    const char *checks[MAX_CHECKS];
    layer_call call; /* NULL: kernels. Otherwise there is one version, with one task for each row, and no kernel */
    query_call tail; /* NULL unless this is the program's tail: the same, but one task for all rows, which have one answer */
    void *context;   /* of `call`, or `tail` */
};

/* One input or output. */
struct tensor {
    uint64_t row_bytes;
    /* Where a row of it lies in the row's arena while a lease has several members: batch kernels need one stride for all rows. NOT_STAGED:
     * no batch kernel uses it, and it stays where each request has it. */
    uint64_t staged;
};
#define NOT_STAGED UINT64_MAX

/* What a number of an instance is (artifact/instances.py). */
enum varying {
    VARYING_ARGUMENTS,
    VARYING_OFFSET,
    VARYING_KERNEL,
    VARYING_TASKS,
    VARYING_BATCH_KERNEL,
    VARYING_BATCH_TASKS,
    VARYING_MAX_RANKS,
    VARYING_ROW_NS,
    VARYING_INPUT_BYTES,
    VARYING_OUTPUT_BYTES,
};

/* Where a number goes. Also how executor/worker.py packs it. */
struct varying_place {
    uint32_t kind, layer, index;
};

/* Sizes of symbolic dimensions for which a program has the same layers. One instance at a time is what the program says. */
struct instances {
    uint32_t count; /* 0: the program has one set of sizes */
    uint32_t current, place_count, kernel_count;
    struct varying_place *places; /* this and the next two are of `calloc` */
    uint64_t *numbers;            /* of each instance, by place */
    kernel *kernels;
};
/* Of a slot's join_key: the instance that it wants. */
enum { INSTANCE_SHIFT = 32 };
#define INSTANCE_MASK UINT64_C(0x7fffffff)

struct program {
    uint32_t layer_count, input_count, output_count; /* a tail makes all outputs: then none is counted here */
    uint64_t arena_bytes;              /* of one row */
    uint64_t staging_bytes;            /* of one row, behind those: for leases with several members */
    uint64_t pack_bytes, unpack_bytes; /* of a row's staged inputs, and outputs: what is copied */
    struct tensor *inputs, *outputs;   /* of `calloc` */
    bool joins;    /* leases may have several members: every tensor that a batch kernel uses is staged */
    char *weights; /* mapped read-only */
    size_t weights_bytes;
    void *library; /* of dlopen */
    struct layer *layers;
    bool calls;       /* a layer is a call */
    struct instances instances;
    query_call whole; /* NULL: layers. Otherwise there is one, with one task for all rows, and no kernel; inputs are in a frame, too */
    void *context;    /* of `whole` */
};

/* The last layer, if it makes frames of answers. */
static inline bool has_tail(const struct program *program) { return program->layer_count && program->layers[program->layer_count - 1].tail; }

static inline bool is_batch(const struct version *version, uint32_t rows) { return rows > 1 && version->batch.run; }

/* How many calls' worth of rows a query has: tasks are numbered group by group. */
static inline uint32_t row_groups(const struct version *version, uint32_t rows) {
    return is_batch(version, rows) ? (rows + version->batch.rows - 1) / version->batch.rows : rows;
}

/* Opens kernels and weights. Returns NULL, or what went wrong (valid until the next call); `program_close` is needed in both cases. */
const char *program_open(struct program *program, const char *kernels, const char *weights);
void program_close(struct program *program);

/* Lets the program be that of an instance; false: there is no such instance. Numbers are known to be sound. Between two leases only. */
bool program_choose(struct program *program, uint64_t number);
/* Adds up what a row's staged tensors take, after their sizes have changed. */
uint64_t program_staged_bytes(const struct tensor *tensors, uint32_t count);

#endif
