/* Everything that lies in shared memory: layouts, and the packing of the words that change atomically.
 *
 * All of it is little endian, aligned to cache lines where two sides write, and read by Python through offsets that the tests compare
 * (module.c exports them as LAYOUT). Fields that are not _Atomic are handed over by a release store of a neighbour that is. */
#ifndef GANGWAY_LAYOUT_H
#define GANGWAY_LAYOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

enum {
    CACHE_LINE = 64,
    MAX_RANKS = 64,   /* of one gang: a bit each in lease.present */
    MAX_MEMBERS = 64, /* of one lease: requests that are executed together */
    MAX_PARTS = 64,   /* of one request: a bit each in slot.parts_done */
    MAX_LAYERS = 4096,
    MAX_TENSORS = 32,
    MAX_ARGUMENTS = 8,
    MAX_VERSIONS = 5,
    MAX_CHECKS = 8,       /* of one layer: kinds of numbers that it refuses */
    REASON_BYTES = 256,   /* of a failure, with the 0 behind it */
    MAX_MODELS = 1024,
    MAX_TASKS = 1 << 22, /* of one layer, all rows together */
    MAX_PAGES = 1 << 16, /* of one lease, without those that copy */
    MAX_REGIONS = 128,   /* of clients' memory, mapped into the workers at a time */
    REGION_SHIFT = 48,   /* see place_region */
    REGION_ALIGNMENT = 4 /* kernels ask for no more than their elements do: of those that may be there, floats */
};

/* -- messages (executor/messages.py has the table) */

enum message_kind { SUBMIT = 1, CANCEL, RUN, LOAD, UNLOAD, EXIT, LEFT, LOADED, UNLOADED, READY };
enum left_reason { LEFT_DONE, LEFT_STOPPED, LEFT_SHRUNK, LEFT_ABORTED, LEFT_TIMEOUT, LEFT_INVALID, LEFT_STALE };

struct message {
    union { /* every kind begins with `kind` */
        uint32_t kind;
        struct { uint32_t kind, slot, generation; } request; /* SUBMIT, CANCEL */
        struct { uint32_t kind, lease, rank, generation, reason, unused; uint64_t joined_ns, left_ns; } gang; /* RUN to generation, LEFT all */
        struct { uint32_t kind, model_id, ok, unused; char text[48]; } model; /* LOAD (ok: at once; text: key), UNLOAD, LOADED (error), UNLOADED */
        struct { uint32_t kind, pid; } ready;
        char bytes[64];
    };
};

/* -- rings and bells */

struct ring {
    _Alignas(CACHE_LINE) _Atomic uint32_t tail; /* messages sent; only the producer writes it */
    _Alignas(CACHE_LINE) _Atomic uint32_t head; /* messages received; only the consumer writes it */
    _Alignas(CACHE_LINE) uint32_t capacity;     /* a power of two */
    _Alignas(CACHE_LINE) struct message messages[];
};

struct bell {
    _Alignas(CACHE_LINE) _Atomic uint32_t strokes; /* futex word */
    _Atomic uint32_t sleeping;                     /* the consumer is in the kernel, or about to be */
    _Atomic uint32_t patient; /* the consumer does not want to be woken for what can wait (ring.c) */
    _Atomic uint32_t letters; /* so many times it was rung for something that is in no ring */
    _Atomic uint32_t calm;    /* as `patient`, for requests that can wait */
};

struct worker_status {
    _Alignas(CACHE_LINE) _Atomic uint32_t pid;
    _Atomic uint32_t busy;  /* set before a command is taken, cleared after it has been answered */
    _Atomic uint32_t lease; /* index + 1 of the lease it is in, 0: none */
    uint32_t unused;
    _Atomic uint64_t runs;
    _Atomic uint64_t busy_ns;
};

/* -- request slots */

enum slot_state { SLOT_FREE, SLOT_FILLING, SLOT_SUBMITTED, SLOT_RUNNING, SLOT_DONE };
enum slot_status {
    STATUS_OK, STATUS_CANCELLED, STATUS_UNAVAILABLE, STATUS_DEADLINE, STATUS_INTERNAL, STATUS_LATE, STATUS_QUEUE_FULL,
    STATUS_CROWDED, STATUS_INVALID, STATUS_CRASHED, STATUS_NO_MEMORY
};

struct slot {
    /* state (8 bits), status (8), 16 unused, generation (32). The low half is the futex word. */
    _Alignas(1024) _Atomic uint64_t word;
    _Atomic uint32_t cancel;
    _Atomic uint32_t attempts;
    uint32_t model_id;
    uint32_t rows;
    int32_t priority;
    _Atomic uint32_t ranks; /* of the largest gang that worked on it */
    uint64_t arrival_ns, deadline_ns;
    _Atomic uint64_t compute_start_ns, compute_end_ns; /* from the first task of any part to the last one of any */
    uint64_t input_frame_bytes, output_frame_bytes;    /* of a request to a whole program (program.h) */
    uint64_t limit_ns;
    uint64_t join_key; /* only requests with the same one may be executed together */
    uint32_t blocks, conflicts, preemptions, versions;
    uint32_t rejects_late, max_queue;
    _Atomic uint32_t by_bell; /* nobody waits for this answer alone: it is told by the bell */
    uint32_t parts;           /* into how many it is split: one lease executes each; answered when all are done */
    uint32_t batch_rows;      /* of the batch that it was executed in */
    _Atomic uint32_t leads;   /* it stands for its batch in statistics: one request of each batch does */
    _Atomic uint64_t parts_done; /* bit p: part p; of use where there are several */
    _Atomic uint32_t failure;    /* the status that its computation has come to so far, STATUS_OK at its start */
    _Alignas(CACHE_LINE) uint64_t input_offset[MAX_TENSORS]; /* see place_region */
    uint64_t output_offset[MAX_TENSORS];
    struct bell bell; /* in the first slot of a table: for whoever waits for the answers of many */
    char reason[REASON_BYTES]; /* of `failure`: text, UTF-8 */
};

static inline uint64_t slot_word(uint32_t state, uint32_t status, uint32_t generation) {
    return (uint64_t)generation << 32 | status << 8 | state;
}
static inline uint32_t slot_state(uint64_t word) { return word & 0xff; }
static inline uint32_t slot_status(uint64_t word) { return word >> 8 & 0xff; }
static inline uint32_t slot_generation(uint64_t word) { return word >> 32; }

/* Where a tensor is, as a slot says it: so many bytes from the start of the io segment (bits 48-63 are 0) or of a region. */
static inline uint64_t place_region(uint64_t place) { return place >> REGION_SHIFT; } /* the region's number; 0: the io segment */
static inline uint64_t place_offset(uint64_t place) { return place & ((UINT64_C(1) << REGION_SHIFT) - 1); }

/* -- leases */

enum control { CONTROL_RUN, CONTROL_STOP, CONTROL_STOP_NOW };
/* PACK and UNPACK are pages, as OPEN is: rows are copied before the first layer and after the last one (page.h). */
enum phase_kind { PHASE_OPEN, PHASE_STOPPED, PHASE_END, PHASE_PACK, PHASE_UNPACK };

struct range {
    _Alignas(CACHE_LINE) _Atomic uint64_t word;
};

/* Rows [first_row, first_row + rows) of the request in a slot: its part number `part`. */
struct member {
    uint32_t front_end, slot, generation, first_row, rows, part;
};

/* The rows of a lease are those of its members, one after the other. */
struct lease {
    /* Written by the scheduler while no rank is in; constant after that. */
    _Alignas(CACHE_LINE) _Atomic uint32_t generation; /* grows with every use of the lease */
    uint32_t model_id, member_count, end_layer, timeout_us;
    uint32_t pass_layers, passes; /* see `page_step` */
    uint64_t arena_offset, arena_stride;
    struct member members[MAX_MEMBERS];

    _Alignas(CACHE_LINE) _Atomic uint64_t phase;    /* see `struct phase`; the low half is the futex word */
    _Alignas(CACHE_LINE) _Atomic uint32_t finished; /* tasks of this page that have been executed */

    _Alignas(CACHE_LINE) _Atomic uint32_t control;
    _Atomic uint32_t aborted;
    _Atomic uint32_t wanted;
    _Atomic uint32_t sleepers; /* ranks in the kernel; too high after a death, which costs only needless wake-ups */

    _Alignas(CACHE_LINE) _Atomic uint64_t present; /* bit r: rank r is in */
    _Atomic uint64_t start_ns;                     /* the first rank joined */
    _Atomic uint32_t most_ranks;                   /* largest gang at a page turn */

    struct range ranges[MAX_RANKS];
    _Alignas(CACHE_LINE) _Atomic uint64_t layer_end_ns[MAX_LAYERS]; /* by step */
    uint8_t versions[MAX_LAYERS];
};

/* What `lease.phase` says. A *page* is one layer in progress, or rows being copied; `tag` tells pages apart, `number` is the page's place
 * in the order of pages (`page_step`; rows are packed with the number of the first page, unpacked with that of the last one). `poke`
 * changes when sleeping ranks shall look at control, wanted and abort. 18 bits of tag never wrap within the life of a stale reader: a
 * rank in a lease pins its generation, and a generation has at most MAX_PAGES + 2 pages. */
struct phase {
    uint32_t tag;     /* bits 14-31 */
    uint32_t number;  /* bits 32-47 */
    uint32_t parts;   /* bits 48-55: into how many parts the tasks are cut */
    uint32_t version; /* bits 56-59: of this layer */
    uint32_t kind;    /* bits 60-63 */
};

enum { POKE_BITS = 14, TAG_BITS = 18, TASK_BITS = 23 };
#define POKE_MASK ((UINT64_C(1) << POKE_BITS) - 1)
#define TAG_MASK ((UINT32_C(1) << TAG_BITS) - 1)
#define TASK_MASK ((UINT64_C(1) << TASK_BITS) - 1)

static inline uint64_t phase_pack(struct phase phase) {
    return (uint64_t)phase.kind << 60 | (uint64_t)phase.version << 56 | (uint64_t)phase.parts << 48 |
           (uint64_t)phase.number << 32 | (uint64_t)(phase.tag & TAG_MASK) << POKE_BITS;
}
static inline struct phase phase_unpack(uint64_t word) {
    return (struct phase){
        .tag = word >> POKE_BITS & TAG_MASK,
        .number = word >> 32 & 0xffff,
        .parts = word >> 48 & 0xff,
        .version = word >> 56 & 0xf,
        .kind = word >> 60,
    };
}

/* The order of pages. A lease computes its first `pass_layers` layers in `passes`, each of them for some of the rows, so that what a layer
 * writes is still in the caches when the next one reads it; then layer after layer for all rows. Who is not in the gang needs not know:
 * for them a lease has as many *steps* as layers. Of the passes each step is as many pages as there are passes. */
static inline uint32_t page_step(const struct lease *lease, uint32_t number) {
    uint32_t head = lease->pass_layers * lease->passes;
    return number < head ? number / lease->passes : number - head + lease->pass_layers;
}
static inline uint32_t step_page(const struct lease *lease, uint32_t step) { /* its first one */
    uint32_t head = lease->pass_layers * lease->passes;
    return step < lease->pass_layers ? step * lease->passes : step - lease->pass_layers + head;
}
static inline uint32_t page_layer(const struct lease *lease, uint32_t number) {
    return number < lease->pass_layers * lease->passes ? number % lease->pass_layers : page_step(lease, number);
}

/* What `range.word` says: tasks [begin, end) of the part are not yet claimed, if `tag` is the page's. */
static inline uint64_t range_pack(uint32_t tag, uint32_t begin, uint32_t end) {
    return (uint64_t)(tag & TAG_MASK) << (2 * TASK_BITS) | (uint64_t)begin << TASK_BITS | end;
}
static inline uint32_t range_tag(uint64_t word) { return word >> (2 * TASK_BITS) & TAG_MASK; }
static inline uint32_t range_begin(uint64_t word) { return word >> TASK_BITS & TASK_MASK; }
static inline uint32_t range_end(uint64_t word) { return word & TASK_MASK; }

_Static_assert(sizeof(struct message) == 64, "a message is one cache line");
_Static_assert(sizeof(struct slot) == 1024, "a slot is 1 KiB");
_Static_assert(MAX_PARTS <= 64, "parts have a bit each");
_Static_assert(sizeof(struct worker_status) == 64, "a worker's status is one cache line");
_Static_assert(2 * TASK_BITS + TAG_BITS == 64 && POKE_BITS + TAG_BITS == 32, "words are full");
_Static_assert(MAX_TASKS < 1 << TASK_BITS && MAX_PAGES <= 1 << 16 && MAX_PAGES < 1 << (TAG_BITS - 1), "fields hold their values");

#endif
