/* What the parts of the stress test share: stress.c says what it does. */
#ifndef STRESS_H
#define STRESS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../executor/native/gang.h"
#include "../../executor/native/lease.h"
#include "../../executor/native/ring.h"
#include "../../executor/native/slot.h"
#include "../../executor/native/wait.h"
#include "../../executor/native/worker.h"

enum { LAYERS = 8, TASKS = 32, REQUESTS = 4, REQUEST_ROWS = 3, LINE = REQUESTS * REQUEST_ROWS, GANGS = 3 };
enum { WORKERS = 8, VERSIONS = 3, FRONT_ENDS = 2, RING = 64, HANG_S = 100, NOBODY_RINGS_S = 60, PATIENCE_US = 1000, MODEL = 3 };
/* A row: the arena's own 64 bytes, then its staged input and output. */
enum { ARENA_ROW = 64, INPUT_ROW = 256, OUTPUT_ROW = LAYERS * TASKS * 4, STRIDE = ARENA_ROW + INPUT_ROW + OUTPUT_ROW };
enum { ARENA_BYTES = GANGS * LINE * STRIDE };
/* Of a front end: slots, then inputs and outputs, then lists of places. */
enum { MANY = INLINE_PLACES + 7, LIST_BYTES = MANY * 8 }; /* inputs, or outputs, of some models */
enum { HEAP = 4096, INPUT_SPAN = REQUEST_ROWS * INPUT_ROW, OUTPUT_SPAN = REQUEST_ROWS * OUTPUT_ROW };
enum { LISTS = HEAP + REQUESTS * (INPUT_SPAN + OUTPUT_SPAN), IO_BYTES = LISTS + REQUESTS * 2 * LIST_BYTES };

struct request {
    struct slot *table, *slot;
    uint32_t generation, rows, parts;
    uint32_t first; /* its first row in the line of all rows */
    char *input, *output;
};

struct gang {
    struct lease *lease;
    struct member members[REQUESTS];
    uint32_t member_count;
    uint32_t first, rows; /* of the line */
    uint64_t inside;      /* bit r: rank r has been sent in and has not left */
    uint32_t generation, wanted;
    bool ended, aborted;
    struct { int runs; } cells[LAYERS][LINE][TASKS];
    _Atomic uint32_t tasks[LAYERS][LINE]; /* of the kernel that computed the row; 0: none has yet */
};

struct span {
    uint32_t first, end;
};

extern struct program program;
extern struct layer layers[LAYERS];
extern struct gang gangs[GANGS];
extern struct request requests[REQUESTS];
extern struct lease leases[GANGS];
extern uint32_t gang_count, request_count;
extern uint32_t fails; /* bit q: what a whole program says of request q */
extern char *io[FRONT_ENDS];
extern unsigned joined, split;

uint32_t random_below(uint32_t limit);

/* stress_model.c */
void make_program(void);
void check_row(const struct gang *gang, uint32_t layer, uint32_t row); /* every task of the layer was executed once */

/* stress_batch.c */
uint32_t make_batch(void);
bool is_alone_in_no_request(const struct gang *gang);
void check_parts(const struct gang *gang, bool done);
void check_gang(const struct gang *gang);
void check_request(const struct request *request, uint32_t rows, bool failed);

#define CHECK(condition, ...)                                                      \
    do {                                                                           \
        if (!(condition)) {                                                        \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);        \
            fprintf(stderr, __VA_ARGS__);                                          \
            fputc('\n', stderr);                                                   \
            abort();                                                               \
        }                                                                          \
    } while (0)

#endif
