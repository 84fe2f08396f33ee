#include "worker.h"

#include "gang.h"
#include "place.h"
#include "ring.h"
#include "wait.h"

enum { IDLE_US = 60 * 1000 * 1000, FULL_RING_NS = 1000 * 1000, SHORT_WAITS = 4 };

/* A scheduler that has died leaves the completion ring unread. Its successor reads it, so this waits. */
static void post(struct worker *worker, const struct message *message) {
    while (!ring_send(worker->completions, message)) {
        bell_ring(worker->scheduler_bell);
        nanosleep(&(struct timespec){.tv_nsec = FULL_RING_NS}, NULL);
    }
}

void worker_send(struct worker *worker, const struct message *message) {
    post(worker, message);
    bell_ring(worker->scheduler_bell);
}

/* After LEFT_DONE the client has its answer. Only the core is left to give away, and the scheduler knows whether anything waits for it. */
static void send_left(struct worker *worker, const struct message *left) {
    post(worker, left);
    if (left->gang.reason == LEFT_DONE) {
        bell_ring_for_completion(worker->scheduler_bell);
    } else {
        bell_ring(worker->scheduler_bell);
    }
}

static enum left_reason join(struct worker *worker, struct lease *lease, uint32_t rank, uint32_t generation) {
    struct query query;
    if (atomic_load(&lease->generation) != generation) return LEFT_STALE;
    if (place_lease(worker, lease, &query)) return gang_run(lease, &query, rank, worker->spin_us);
    /* A rank that comes too late finds a slot answered, maybe in use again: that is no error. */
    switch (phase_unpack(atomic_load(&lease->phase)).kind) {
        case PHASE_END: return LEFT_DONE;
        case PHASE_STOPPED: return LEFT_STOPPED;
        default: return LEFT_INVALID;
    }
}

static void run_command(struct worker *worker, const struct message *command) {
    struct message left = *command;
    left.kind = MESSAGE_LEFT;
    left.gang.reason = LEFT_INVALID;
    if (command->gang.lease < worker->lease_count && command->gang.rank < MAX_RANKS) {
        left.gang.joined_ns = now_ns();
        atomic_store(&worker->status->lease, command->gang.lease + 1);
        left.gang.reason = join(worker, &worker->leases[command->gang.lease], command->gang.rank, command->gang.generation);
        atomic_store(&worker->status->lease, 0);
        left.gang.left_ns = now_ns();
        atomic_fetch_add(&worker->status->busy_ns, left.gang.left_ns - left.gang.joined_ns);
        atomic_fetch_add(&worker->status->runs, 1);
    }
    send_left(worker, &left);
}

void worker_nudge(struct worker *worker) {
    atomic_store(&worker->nudged, 1);
    bell_ring(worker->bell);
}

static bool was_nudged(struct worker *worker) { return atomic_load(&worker->nudged) && atomic_exchange(&worker->nudged, 0); }

/* `busy` is set before a command leaves the ring: an empty ring and an idle worker together mean that no command is in progress. */
struct message worker_loop(struct worker *worker) {
    struct message command;
    uint64_t waited_ns = 0;
    for (;;) {
        uint32_t seen = bell_seen(worker->bell);
        atomic_store(&worker->status->busy, 1);
        for (;;) {
            if (was_nudged(worker)) return (struct message){0};
            if (!ring_receive(worker->commands, &command)) break;
            if (command.kind != MESSAGE_RUN) return command;
            run_command(worker, &command);
        }
        if (!worker->background) atomic_store(&worker->status->busy, 0);
        /* A spinning worker keeps the core from others: it spins only if the last wait was about as short, a wake-up included. */
        bool quick = waited_ns < SHORT_WAITS * worker->spin_us * UINT64_C(1000);
        uint64_t start_ns = now_ns();
        bell_wait(worker->bell, seen, quick ? worker->spin_us : 0, IDLE_US);
        waited_ns = now_ns() - start_ns;
    }
}
