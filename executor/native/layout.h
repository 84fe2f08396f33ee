/* The layout of shared memory: structures, and the packing of the words that change atomically. It is stated only here.
 *
 * All of it is little endian, and aligned to cache lines where two sides write. Fields that are not _Atomic are handed over by a release
 * store of a neighbour that is. What Python reads or writes, too, is written as a list (an X macro): from one list come the C declaration
 * and the table _native.LAYOUT, of which executor/segment.py makes Python's formats. */
#ifndef GANGWAY_LAYOUT_H
#define GANGWAY_LAYOUT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define DECLARE_VALUE(NAME, VALUE) NAME = VALUE,
#define DECLARE_NAME(NAME) NAME,
#define DECLARE_FIELD(TYPE, NAME, DIMENSION) TYPE NAME DIMENSION;

enum { CACHE_LINE = 64 };

#define LIMITS(VALUE)                                                                                                         \
    VALUE(MAX_RANKS, 64)       /* of one gang: a bit each in lease.present */                                                 \
    VALUE(MAX_MEMBERS, 64)     /* of one lease: requests that are executed together */                                        \
    VALUE(MAX_PARTS, 64)       /* of one request: a bit each in slot.parts_done */                                            \
    VALUE(MAX_AWAITED, 64)     /* slots that one call waits for */                                                            \
    VALUE(MAX_LAYERS, 4096)                                                                                                   \
    VALUE(MAX_TENSORS, 1024)   /* inputs, and outputs, of one model */                                                        \
    VALUE(INLINE_PLACES, 32)   /* inputs, and outputs, whose places a slot itself has */                                      \
    VALUE(MAX_ARGUMENTS, 8)    /* of one kernel */                                                                            \
    VALUE(MAX_OPERANDS, 32)    /* of one layer that is a call */                                                              \
    VALUE(MAX_VERSIONS, 5)                                                                                                    \
    VALUE(MAX_CHECKS, 8)       /* of one layer: kinds of numbers that its kernels refuse */                                   \
    VALUE(MAX_MODELS, 1024)                                                                                                   \
    VALUE(MAX_TASKS, 1 << 22)  /* of one layer, all rows together */                                                          \
    VALUE(MAX_PHASES, 1 << 16) /* of one lease, without those that copy */                                                    \
    VALUE(MAX_REGIONS, 128)    /* of clients' memory, mapped into the workers at a time */                                    \
    VALUE(REGION_SHIFT, 48)    /* see place_region */                                                                         \
    VALUE(REGION_ALIGNMENT, 4) /* kernels need the alignment of their elements: at most that of a float in a region */

enum { LIMITS(DECLARE_VALUE) };
enum { REASON_BYTES = 256, ERROR_BYTES = 48 }; /* of a failure, with the 0 behind it; of a load that failed, without */

/* -- messages */

#define MESSAGE_KINDS(NAME)                                                                                                   \
    NAME(MESSAGE_SUBMIT)   /* front end -> scheduler: the slot holds a request */                                             \
    NAME(MESSAGE_CANCEL)   /* front end -> scheduler: nobody waits for the answer any more */                                 \
    NAME(MESSAGE_RUN)      /* scheduler -> worker: join the lease; answered by exactly one LEFT */                            \
    NAME(MESSAGE_LOAD)     /* scheduler -> worker: the artifact is to be ready */                                             \
    NAME(MESSAGE_UNLOAD)   /* scheduler -> worker: forget the model */                                                        \
    NAME(MESSAGE_EXIT)     /* scheduler -> worker: end */                                                                     \
    NAME(MESSAGE_LEFT)     /* worker -> scheduler: this rank touches the lease and its memory no more */                      \
    NAME(MESSAGE_LOADED)   /* worker -> scheduler: the answer to LOAD */                                                      \
    NAME(MESSAGE_UNLOADED) /* worker -> scheduler: the answer to UNLOAD */                                                    \
    NAME(MESSAGE_READY)    /* worker -> scheduler, its first message */

enum message_kind { MESSAGE_NONE, MESSAGE_KINDS(DECLARE_NAME) }; /* none is 0: a ring of zeros holds no message */

#define LEFT_REASONS(NAME)                                                                                                    \
    NAME(LEFT_DONE) NAME(LEFT_STOPPED) NAME(LEFT_SHRUNK) NAME(LEFT_ABORTED) NAME(LEFT_TIMEOUT) NAME(LEFT_INVALID) NAME(LEFT_STALE)

enum left_reason { LEFT_REASONS(DECLARE_NAME) };

#define REQUEST_MESSAGE(FIELD) /* SUBMIT, CANCEL */                                                                           \
    FIELD(uint32_t, kind, ) FIELD(uint32_t, slot, ) FIELD(uint32_t, generation, )

#define GANG_MESSAGE(FIELD) /* RUN: up to `generation`; LEFT */                                                               \
    FIELD(uint32_t, kind, ) FIELD(uint32_t, lease, ) FIELD(uint32_t, rank, ) FIELD(uint32_t, generation, )                    \
    FIELD(uint32_t, reason, ) FIELD(uint32_t, unused, ) FIELD(uint64_t, joined_ns, ) FIELD(uint64_t, left_ns, )

#define MODEL_MESSAGE(FIELD) /* LOAD, UNLOAD, LOADED, UNLOADED */                                                             \
    FIELD(uint32_t, kind, ) FIELD(uint32_t, model_id, )                                                                       \
    FIELD(uint32_t, ok, ) /* LOADED; of LOAD: at once */                                                                      \
    FIELD(uint32_t, unused, )                                                                                                 \
    FIELD(char, text, [ERROR_BYTES]) /* LOADED: the error, UTF-8; LOAD: the 32 bytes of the artifact's key */

#define WORKER_MESSAGE(FIELD) /* READY */                                                                                     \
    FIELD(uint32_t, kind, ) FIELD(uint32_t, pid, )

struct request_message { REQUEST_MESSAGE(DECLARE_FIELD) };
struct gang_message { GANG_MESSAGE(DECLARE_FIELD) };
struct model_message { MODEL_MESSAGE(DECLARE_FIELD) };
struct worker_message { WORKER_MESSAGE(DECLARE_FIELD) };

#define MESSAGE(FIELD) FIELD(uint32_t, kind, ) FIELD(char, bytes, [64])

struct message {
    union { /* every kind begins with `kind` */
        MESSAGE(DECLARE_FIELD)
        struct request_message request;
        struct gang_message gang;
        struct model_message model;
        struct worker_message worker;
    };
};

/* -- rings and bells */

struct ring {
    _Alignas(CACHE_LINE) _Atomic uint32_t tail; /* messages sent; only the producer writes it */
    _Alignas(CACHE_LINE) _Atomic uint32_t head; /* messages received; only the consumer writes it */
    _Alignas(CACHE_LINE) uint32_t capacity;     /* a power of two */
    _Alignas(CACHE_LINE) struct message messages[];
};

#define BELL(FIELD)                                                                                                           \
    FIELD(_Alignas(CACHE_LINE) _Atomic uint32_t, strokes, ) /* futex word */                                                  \
    FIELD(_Atomic uint32_t, sleeping, ) /* the consumer is in the kernel, or about to be */                                   \
    FIELD(_Atomic uint32_t, skip_completion_wakeups, )  /* the consumer is not woken for a query that has been answered */    \
    FIELD(_Atomic uint32_t, control_seq, ) /* how often it was rung for something that is in no ring */                       \
    FIELD(_Atomic uint32_t, skip_best_effort_wakeups, ) /* nor for a request that preempts nobody */                          \
    /* An eventfd that wakes the consumer, of the same number in each process that rings: all inherit it. 0: none does. */    \
    FIELD(uint32_t, event_fd, ) /* constant since before any of them began */

struct bell { BELL(DECLARE_FIELD) };

#define WORKER_STATUS(FIELD)                                                                                                  \
    FIELD(_Alignas(CACHE_LINE) _Atomic uint32_t, pid, )                                                                       \
    FIELD(_Atomic uint32_t, busy, )  /* set before a command is taken, cleared after it has been answered */                  \
    FIELD(_Atomic uint32_t, lease, ) /* index + 1 of the lease it is in, 0: none */                                           \
    FIELD(uint32_t, unused, )                                                                                                 \
    FIELD(_Atomic uint64_t, runs, )                                                                                           \
    FIELD(_Atomic uint64_t, busy_ns, )

struct worker_status { WORKER_STATUS(DECLARE_FIELD) };

/* -- request slots */

#define SLOT_STATES(NAME) NAME(SLOT_FREE) NAME(SLOT_FILLING) NAME(SLOT_SUBMITTED) NAME(SLOT_RUNNING) NAME(SLOT_DONE)
#define SLOT_STATUSES(NAME)                                                                                                   \
    NAME(STATUS_OK) NAME(STATUS_CANCELLED) NAME(STATUS_UNAVAILABLE) NAME(STATUS_DEADLINE) NAME(STATUS_INTERNAL)               \
    NAME(STATUS_LATE) NAME(STATUS_QUEUE_FULL) NAME(STATUS_CROWDED) NAME(STATUS_INVALID) NAME(STATUS_CRASHED)                  \
    NAME(STATUS_NO_MEMORY)

enum slot_state { SLOT_STATES(DECLARE_NAME) };
enum slot_status { SLOT_STATUSES(DECLARE_NAME) };

#define SLOT(FIELD)                                                                                                           \
    /* state (8 bits), status (8), 16 unused, generation (32). The low half is the futex word. */                             \
    FIELD(_Alignas(1024) _Atomic uint64_t, word, )                                                                            \
    FIELD(_Atomic uint32_t, cancel, )                                                                                         \
    FIELD(_Atomic uint32_t, attempts, )                                                                                       \
    FIELD(uint32_t, model_id, )                                                                                               \
    FIELD(_Atomic uint32_t, rows, ) /* a late rank reads this, `parts` and the offsets while the next request is filled in */ \
    FIELD(int32_t, priority, )                                                                                                \
    FIELD(_Atomic uint32_t, ranks, ) /* of the largest gang that worked on it */                                              \
    FIELD(uint64_t, arrival_ns, )                                                                                             \
    FIELD(uint64_t, deadline_ns, )                                                                                            \
    FIELD(_Atomic uint64_t, compute_start_ns, ) /* the first task of any part */                                              \
    FIELD(_Atomic uint64_t, compute_end_ns, )   /* the last one of any */                                                     \
    FIELD(uint64_t, input_frame_bytes, )        /* of a request to a whole program, or, of outputs, to a tail (program.h) */  \
    FIELD(uint64_t, output_frame_bytes, )                                                                                     \
    FIELD(uint64_t, limit_ns, )                                                                                               \
    FIELD(_Atomic uint64_t, join_key, ) /* only requests with the same one may be executed together; see INSTANCE_SHIFT */    \
    FIELD(uint64_t, compound, ) /* of the compound task that it is a member of; 0: of none */                                 \
    FIELD(uint64_t, queue_end_ns, ) /* it waits no longer to be started; 0: as long as it takes */                            \
    FIELD(_Atomic uint32_t, blocks, ) /* this and `versions`: what the scheduler began, then what leases did beyond that */   \
    FIELD(uint32_t, conflicts, )                                                                                              \
    FIELD(uint32_t, preemptions, )                                                                                            \
    FIELD(_Atomic uint32_t, versions, ) /* bit v: version v of a layer was used */                                            \
    FIELD(uint32_t, bf16, )             /* 1: it is computed in bf16, and the model is there in fp32, too */                  \
    FIELD(uint32_t, rejects_late, )                                                                                           \
    FIELD(uint32_t, max_queue, )                                                                                              \
    FIELD(uint32_t, delays, ) /* then it goes behind others; else it is refused */                                            \
    FIELD(_Atomic uint32_t, by_bell, ) /* the answer rings the table's bell; no thread waits for it alone */                  \
    FIELD(_Atomic uint32_t, parts, ) /* into how many it is split: one lease executes each; answered when all are done */             \
    FIELD(uint32_t, batch_rows, )      /* of the batch that it was executed in */                                             \
    FIELD(_Atomic uint32_t, leads, )   /* statistics count its batch by it: one request of each batch leads */                \
    FIELD(uint64_t, seen_ns, )         /* for traces: the scheduler has read the request, 0: it has not */                    \
    FIELD(uint64_t, started_ns, )      /* the scheduler has decided; the workers are told next */                             \
    FIELD(_Atomic uint64_t, parts_done, ) /* bit p: part p; used only if there are several */                                 \
    FIELD(_Atomic uint32_t, failure, ) /* the status of its computation so far; STATUS_OK at its start */                     \
    /* See place_region. More than INLINE_PLACES are in a list of as many words, and the first one here says where that begins. */     \
    FIELD(_Alignas(CACHE_LINE) _Atomic uint64_t, input_offset, [INLINE_PLACES])                                                        \
    FIELD(_Atomic uint64_t, output_offset, [INLINE_PLACES])                                                                            \
    FIELD(struct bell, bell, ) /* used in the first slot of a table: for a loop that waits for the answers of many */         \
    FIELD(char, reason, [REASON_BYTES]) /* of `failure`: text, UTF-8 */

struct slot { SLOT(DECLARE_FIELD) };

static inline uint64_t slot_word(uint32_t state, uint32_t status, uint32_t generation) {
    return (uint64_t)generation << 32 | status << 8 | state;
}
static inline uint32_t slot_state(uint64_t word) { return word & 0xff; }
static inline uint32_t slot_status(uint64_t word) { return word >> 8 & 0xff; }
static inline uint32_t slot_generation(uint64_t word) { return word >> 32; }

/* Where a tensor is, as a slot says it: so many bytes from the start of the io segment (bits 48-63 are 0) or of a region. */
static inline uint64_t place_region(uint64_t place) { return place >> REGION_SHIFT; } /* the region's number; 0: the io segment */
static inline uint64_t place_offset(uint64_t place) { return place & ((UINT64_C(1) << REGION_SHIFT) - 1); }

/* -- leases: Python reaches them by functions (py_lease.c) */

#define CONTROLS(NAME) NAME(CONTROL_RUN) NAME(CONTROL_STOP) NAME(CONTROL_STOP_NOW)
/* PACK and UNPACK are phases, as OPEN is: rows are copied before the first layer and after the last one (phase.h). */
#define PHASE_KINDS(NAME) NAME(PHASE_OPEN) NAME(PHASE_STOPPED) NAME(PHASE_END) NAME(PHASE_PACK) NAME(PHASE_UNPACK)

enum control { CONTROLS(DECLARE_NAME) };
enum phase_kind { PHASE_KINDS(DECLARE_NAME) };

struct range {
    _Alignas(CACHE_LINE) _Atomic uint64_t word;
};

/* Rows [first_row, first_row + rows) of the request in a slot: its part number `part`. */
#define MEMBER(FIELD)                                                                                                         \
    FIELD(uint32_t, front_end, ) FIELD(uint32_t, slot, ) FIELD(uint32_t, generation, )                                        \
    FIELD(uint32_t, first_row, ) FIELD(uint32_t, rows, ) FIELD(uint32_t, part, )

struct member { MEMBER(DECLARE_FIELD) };

/* The rows of a lease are those of its members, one after the other. */
struct lease {
    /* Written by the scheduler while no rank is in; constant after that. */
    _Alignas(CACHE_LINE) _Atomic uint32_t generation; /* grows with every use of the lease */
    uint32_t model_id, member_count, end_layer, timeout_us;
    uint32_t pass_layers, passes; /* see `phase_step` */
    uint64_t arena_offset, arena_stride;
    struct member members[MAX_MEMBERS];

    _Alignas(CACHE_LINE) _Atomic uint64_t phase;    /* see `struct phase_state`; the low half is the futex word */
    _Alignas(CACHE_LINE) _Atomic uint32_t finished; /* tasks of this phase that have been executed */

    _Alignas(CACHE_LINE) _Atomic uint32_t control;
    _Atomic uint32_t aborted;
    _Atomic uint32_t wanted; /* changes by compare-and-swap: see `lease_resize` */
    _Atomic uint32_t sleepers; /* ranks in the kernel; too high after a death, which costs only needless wake-ups */

    _Alignas(CACHE_LINE) _Atomic uint64_t present; /* bit r: rank r is in */
    _Atomic uint64_t start_ns;                     /* the first rank joined */
    _Atomic uint32_t most_ranks;                   /* largest gang at an advance of the phase */
    _Atomic uint32_t blocks;                       /* planned ones that have begun */
    _Atomic uint32_t used_versions;                /* bit v: version v of a layer was used */
    _Atomic uint32_t version_layers;               /* in another version than the first */
    _Atomic uint32_t cpus[MAX_RANKS];              /* of a program with calls: where the ranks that are in run */

    struct range ranges[MAX_RANKS];
    _Alignas(CACHE_LINE) _Atomic uint64_t layer_end_ns[MAX_LAYERS]; /* by step */

    /* The plan. The scheduler changes entries at any time; the rank that advances the phase reads each when it comes to it. */
    _Alignas(CACHE_LINE) _Atomic uint8_t versions[MAX_LAYERS]; /* by layer */
    _Atomic uint8_t block_ranks[MAX_LAYERS];                   /* by step: a block of at most so many ranks begins; 0: none begins */
};

/* What `lease.phase` says. A *phase* is one layer in progress, or rows being copied; `tag` tells phases apart, `number` is a phase's place
 * in the order of phases (`phase_step`; rows are packed with the number of the first phase, unpacked with that of the last one). `kick`
 * changes when sleeping ranks must read control, wanted and aborted again. 18 bits of tag never wrap within the life of a stale reader: a
 * rank in a lease pins its generation, and a generation has at most MAX_PHASES + 2 phases. */
struct phase_state {
    uint32_t tag;     /* bits 14-31 */
    uint32_t number;  /* bits 32-47 */
    uint32_t parts;   /* bits 48-55: into how many parts the tasks are cut */
    uint32_t version; /* bits 56-59: of this layer */
    uint32_t kind;    /* bits 60-63 */
};

enum { KICK_BITS = 14, TAG_BITS = 18, TASK_BITS = 23 };
#define KICK_MASK ((UINT64_C(1) << KICK_BITS) - 1)
#define TAG_MASK ((UINT32_C(1) << TAG_BITS) - 1)
#define TASK_MASK ((UINT64_C(1) << TASK_BITS) - 1)

static inline uint64_t phase_pack(struct phase_state state) {
    return (uint64_t)state.kind << 60 | (uint64_t)state.version << 56 | (uint64_t)state.parts << 48 |
           (uint64_t)state.number << 32 | (uint64_t)(state.tag & TAG_MASK) << KICK_BITS;
}
static inline struct phase_state phase_unpack(uint64_t word) {
    return (struct phase_state){
        .tag = word >> KICK_BITS & TAG_MASK,
        .number = word >> 32 & 0xffff,
        .parts = word >> 48 & 0xff,
        .version = word >> 56 & 0xf,
        .kind = word >> 60,
    };
}

/* The order of phases. A lease computes its first `pass_layers` layers in `passes`, each of them for some of the rows, so that what a layer
 * writes is still in the caches when the next one reads it; then layer after layer for all rows. Outside of
 * the gang a lease has as many *steps* as layers. A step within the passes is as many phases as there are passes. */
static inline uint32_t phase_step(const struct lease *lease, uint32_t number) {
    uint32_t head = lease->pass_layers * lease->passes;
    return number < head ? number / lease->passes : number - head + lease->pass_layers;
}
static inline uint32_t step_phase(const struct lease *lease, uint32_t step) { /* its first one */
    uint32_t head = lease->pass_layers * lease->passes;
    return step < lease->pass_layers ? step * lease->passes : step - lease->pass_layers + head;
}
static inline uint32_t phase_layer(const struct lease *lease, uint32_t number) {
    return number < lease->pass_layers * lease->passes ? number % lease->pass_layers : phase_step(lease, number);
}

/* What `range.word` says: tasks [begin, end) of the part are not yet claimed, if `tag` is the phase's. */
static inline uint64_t range_pack(uint32_t tag, uint32_t begin, uint32_t end) {
    return (uint64_t)(tag & TAG_MASK) << (2 * TASK_BITS) | (uint64_t)begin << TASK_BITS | end;
}
static inline uint32_t range_tag(uint64_t word) { return word >> (2 * TASK_BITS) & TAG_MASK; }
static inline uint32_t range_begin(uint64_t word) { return word >> TASK_BITS & TASK_MASK; }
static inline uint32_t range_end(uint64_t word) { return word & TASK_MASK; }

/* -- the processes' status in the control segment (executor/control.py; C does not read it) */

#define CONTROL_HEADER(FIELD)                                                                                                 \
    FIELD(_Alignas(CACHE_LINE) uint32_t, magic, )                                                                             \
    FIELD(uint32_t, workers, ) FIELD(uint32_t, front_ends, ) FIELD(uint32_t, leases, )

#define MODEL_ACCOUNT(FIELD) /* of one model, by the scheduler */                                                             \
    FIELD(_Alignas(CACHE_LINE) uint64_t, growths, )                                                                           \
    FIELD(uint64_t, shrinks, )                                                                                                \
    FIELD(uint64_t, layers, )         /* executed */                                                                          \
    FIELD(uint64_t, version_layers, ) /* of them in another version than the first */                                         \
    FIELD(uint64_t, planned_blocks, ) /* begun by the plans of leases */                                                      \
    FIELD(uint64_t, arenas, )         /* in use */                                                                            \
    FIELD(uint64_t, arena_bytes, )    /* of memory, idle arenas included */

#define SCHEDULER_BLOCK(FIELD)                                                                                                \
    FIELD(_Alignas(CACHE_LINE) uint32_t, version, ) /* of its layout */                                                       \
    FIELD(uint32_t, sequence, ) /* odd while it is being written */                                                           \
    FIELD(uint32_t, waiting, )  /* requests */                                                                                \
    FIELD(uint32_t, leases, )   /* in use */                                                                                  \
    FIELD(uint64_t, arena_bytes, )                                                                                            \
    FIELD(double, level, )      /* of interference */                                                                         \
    FIELD(uint64_t, compounds, [6]) /* compound tasks: that ran by schedule, and that did not, by reason (control.py) */      \
    FIELD(struct model_account, models, [MAX_MODELS])

#define WORKER_ACCOUNT(FIELD)                                                                                                 \
    FIELD(uint32_t, core, )     /* CPU number */                                                                              \
    FIELD(uint32_t, restarts, )

#define SERVER_BLOCK(FIELD) /* a worker_account for each worker follows */                                                    \
    FIELD(_Alignas(CACHE_LINE) uint32_t, version, ) /* of its layout */                                                       \
    FIELD(uint32_t, front_end_restarts, )                                                                                     \
    FIELD(uint32_t, scheduler_restarts, )                                                                                     \
    FIELD(uint32_t, unused, )                                                                                                 \
    FIELD(double, started_s, )  /* since 1970 */

#define HEARTBEAT(FIELD)                                                                                                      \
    FIELD(_Alignas(CACHE_LINE) uint64_t, seen_ns, ) /* the process was alive, CLOCK_MONOTONIC */                              \
    FIELD(uint64_t, lag_ns, ) /* of a front end: the most that its loop was late, lately */

#define LOST_REGIONS(FIELD) /* not 0: a part of the region of this number + 1 is lost (region.h) */                           \
    FIELD(_Alignas(CACHE_LINE) _Atomic uint32_t, lost, [MAX_REGIONS])

#define DECISION_BLOCK(FIELD) /* the scheduler's last decisions, while somebody watches the server */                         \
    FIELD(_Alignas(CACHE_LINE) uint64_t, watched_ns, ) /* by a front end: somebody watches, CLOCK_MONOTONIC */                \
    FIELD(uint32_t, sequence, ) /* odd while the text is being written */                                                     \
    FIELD(uint32_t, text_bytes, )                                                                                             \
    FIELD(char, text, [1 << 15])
struct control_header { CONTROL_HEADER(DECLARE_FIELD) };
struct model_account { MODEL_ACCOUNT(DECLARE_FIELD) };
struct scheduler_block { SCHEDULER_BLOCK(DECLARE_FIELD) };
struct worker_account { WORKER_ACCOUNT(DECLARE_FIELD) };
struct server_block { SERVER_BLOCK(DECLARE_FIELD) };
struct heartbeat { HEARTBEAT(DECLARE_FIELD) };
struct lost_regions { LOST_REGIONS(DECLARE_FIELD) };
struct decision_block { DECISION_BLOCK(DECLARE_FIELD) };

/* -- what Python sees (module.c) */

#define STRUCTS(STRUCT)                                                                                                       \
    STRUCT(message, MESSAGE) STRUCT(request_message, REQUEST_MESSAGE) STRUCT(gang_message, GANG_MESSAGE)                      \
    STRUCT(model_message, MODEL_MESSAGE) STRUCT(worker_message, WORKER_MESSAGE) STRUCT(bell, BELL)                            \
    STRUCT(worker_status, WORKER_STATUS) STRUCT(slot, SLOT) STRUCT(member, MEMBER)                                            \
    STRUCT(control_header, CONTROL_HEADER) STRUCT(model_account, MODEL_ACCOUNT)                                               \
    STRUCT(scheduler_block, SCHEDULER_BLOCK) STRUCT(worker_account, WORKER_ACCOUNT)                                           \
    STRUCT(server_block, SERVER_BLOCK) STRUCT(heartbeat, HEARTBEAT) STRUCT(lost_regions, LOST_REGIONS)                      \
    STRUCT(decision_block, DECISION_BLOCK)

#define ENUMERATORS(NAME)                                                                                                     \
    MESSAGE_KINDS(NAME) LEFT_REASONS(NAME) SLOT_STATES(NAME) SLOT_STATUSES(NAME) CONTROLS(NAME) PHASE_KINDS(NAME)

_Static_assert(sizeof(struct message) == 64, "a message is one cache line");
_Static_assert(sizeof(struct slot) == 1024, "a slot is 1 KiB");
_Static_assert(MAX_PARTS <= 64, "parts have a bit each");
_Static_assert(sizeof(struct worker_status) == 64, "a worker's status is one cache line");
_Static_assert(2 * TASK_BITS + TAG_BITS == 64 && KICK_BITS + TAG_BITS == 32, "words are full");
_Static_assert(MAX_TASKS < 1 << TASK_BITS && MAX_PHASES <= 1 << 16 && MAX_PHASES < 1 << (TAG_BITS - 1), "fields hold their values");

#endif
