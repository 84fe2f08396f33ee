/* A worker's end of an instance of a Python model, for the plain case of a request: it is handed over, and answered in one go.
 * executor/python_instance.py does everything else. */
#ifndef GANGWAY_INSTANCE_H
#define GANGWAY_INSTANCE_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "layout.h"

enum {
    MESSAGE_BYTES = 4096, /* the longest message that is sent or taken here */
    NUMBER_CORE_BITS = 10, /* python_backend/messages.py: CORE_BITS */
    LEAST_LOOK_MS = 2, MOST_INSTANCE_LOOK_MS = 16, /* how often its CPU clock is looked at: the longer it computes, the less often */
    COMPUTING_PARTS = 5, /* it computes if it does so for one of so many parts of that time */
    TOLD_LOOK_MS = 4, /* how often it is looked whether the core is wanted: each look interrupts the instance */
};

/* What the calling thread's lease is to do (layout.h); NULL: it executes none for an instance. Anything but CONTROL_RUN: its core is wanted. */
extern _Thread_local const _Atomic uint32_t *instance_control;

static inline bool instance_must_leave(void) {
    return instance_control && atomic_load_explicit(instance_control, memory_order_relaxed) != CONTROL_RUN;
}

/* Waits for a message at most so long, and no longer when the core is wanted. Returns what poll does; errno may be EINTR. */
int instance_poll(int socket, uint64_t most_ms);

/* `socket`, `process`: descriptors, -1: it is closed. `memory`: is shared with it; no bytes: it may not be used now. `status`: what the
 * instance shows (python_backend/model_threads.py): how many executions are open, and whether a thread of its model rests; NULL: nothing yet. */
struct instance {
    int socket, process;
    int32_t pid;
    char *memory;
    uint64_t memory_bytes;
    const _Atomic uint8_t *status;
};

struct text {
    const char *bytes;
    uint64_t size;
};

struct move {
    uint64_t from, to, size;
};

/* So many elements of BYTES, which are not cut off, are at a place of a request. */
struct elements {
    uint64_t at, size, count;
};

/* One kind of request, as executor/python_program.py has planned it. `header`: of the message. `common`: how what the instance is told of a
 * request ends, which is at `told_at`. `inputs`: from the request to the memory. `answer`: the header of the answer; `outputs`: from the
 * memory to the block of the answer, to which `status` belongs at `status_at`. `needed_bytes`: of the memory. */
struct handover {
    struct text header, common, answer, status;
    uint64_t told_at, told_bytes, status_at, needed_bytes, timeout_ns;
    struct move *inputs, *outputs;
    struct elements *elements;
    uint32_t input_count, output_count, element_count, core;
};

/* What has been done. `number`: of the message. `looked_ns`: when its clock was looked at last (0: never), which said `computed_ns`.
 * `received`: what has come and is no plain answer. */
struct exchange {
    uint64_t number, begin_ns, looked_ns, computed_ns;
    uint32_t received_bytes;
    char received[MESSAGE_BYTES];
};

enum handed { NOT_HANDED, ANSWERED, NOT_ANSWERED };

/* Whether a message about requests of this kind is short enough. */
bool handover_fits(const struct handover *handover);

/* Hands a request over and waits, at the longest until the instance does not compute. ANSWERED: the answer's contents are in its block.
 * NOT_HANDED: nothing has been done, because it is no such request, or the instance is not free. NOT_ANSWERED: `exchange` says how far it
 * has come. */
enum handed handover_run(const struct instance *instance, const struct handover *handover, const char *request, char *block,
                         struct exchange *exchange);

#endif
