#include "ring.h"

#include "wait.h"

void ring_init(struct ring *ring, uint32_t capacity) {
    ring->capacity = capacity;
    atomic_store(&ring->head, 0);
    atomic_store(&ring->tail, 0);
}

/* A message is sent when the tail has moved past it: a producer that dies earlier has sent nothing. */
bool ring_send(struct ring *ring, const struct message *message) {
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_relaxed);
    if (tail - atomic_load_explicit(&ring->head, memory_order_acquire) >= ring->capacity) return false;
    ring->messages[tail & (ring->capacity - 1)] = *message;
    atomic_store_explicit(&ring->tail, tail + 1, memory_order_release);
    return true;
}

const struct message *ring_peek(struct ring *ring) {
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    if (head == atomic_load_explicit(&ring->tail, memory_order_acquire)) return NULL;
    return &ring->messages[head & (ring->capacity - 1)];
}

void ring_drop(struct ring *ring) {
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_relaxed);
    atomic_store_explicit(&ring->head, head + 1, memory_order_release);
}

bool ring_receive(struct ring *ring, struct message *message) {
    const struct message *oldest = ring_peek(ring);
    if (!oldest) return false;
    *message = *oldest;
    ring_drop(ring);
    return true;
}

uint32_t ring_pending(struct ring *ring) {
    uint32_t head = atomic_load_explicit(&ring->head, memory_order_acquire);
    return atomic_load_explicit(&ring->tail, memory_order_acquire) - head;
}

void ring_discard(struct ring *ring) {
    uint32_t tail = atomic_load_explicit(&ring->tail, memory_order_acquire);
    atomic_store_explicit(&ring->head, tail, memory_order_release);
}

/* Either the producer sees `sleeping`, or the kernel (which compares under its lock) sees the new `strokes`: both sides write their
 * word before they read the other's, sequentially consistent. The same holds for a consumer that reads an eventfd: it looks for
 * messages after bell_arm. Of all that ring until then one pays the system call. */
void bell_ring(struct bell *bell) {
    atomic_fetch_add(&bell->strokes, 1);
    if (!atomic_load(&bell->sleeping)) return;
    if (!bell->event_fd) futex_wake_all(&bell->strokes);
    else if (atomic_exchange(&bell->sleeping, 0)) event_signal((int)bell->event_fd);
}

void bell_arm(struct bell *bell) { atomic_store(&bell->sleeping, 1); }

/* Both sides change such a word, so that there is an order: either the consumer clears it first, and the producer rings, or it does so
 * later, and finds the message when it reads its rings, which comes after that. */
static void ring_unless(struct bell *bell, _Atomic uint32_t *word) {
    if (!atomic_fetch_or(word, 0)) bell_ring(bell);
}

void bell_ring_for_completion(struct bell *bell) { ring_unless(bell, &bell->skip_completion_wakeups); }

void bell_ring_for_best_effort(struct bell *bell) { ring_unless(bell, &bell->skip_best_effort_wakeups); }

void bell_ring_for_control(struct bell *bell) {
    atomic_fetch_add(&bell->control_seq, 1);
    bell_ring(bell);
}

uint32_t bell_control_seq(struct bell *bell) { return atomic_load(&bell->control_seq); }

void bell_take_over(struct bell *bell) {
    atomic_exchange(&bell->skip_completion_wakeups, 0);
    atomic_exchange(&bell->skip_best_effort_wakeups, 0);
}

uint32_t bell_seen(struct bell *bell) { return atomic_load(&bell->strokes); }

uint32_t bell_wait(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us) {
    uint64_t start_ns = now_ns(), waited_ns = 0;
    uint32_t strokes;
    while (waited_ns < spin_us * UINT64_C(1000)) {
        for (int spin = 0; spin < SPINS_PER_CLOCK; spin++) {
            strokes = atomic_load_explicit(&bell->strokes, memory_order_acquire);
            if (strokes != seen) return strokes;
            spin_pause();
        }
        waited_ns = now_ns() - start_ns;
    }
    atomic_store(&bell->sleeping, 1);
    while ((strokes = atomic_load(&bell->strokes)) == seen && waited_ns < timeout_us * 1000) {
        futex_wait(&bell->strokes, seen, timeout_us * 1000 - waited_ns);
        waited_ns = now_ns() - start_ns;
    }
    atomic_store(&bell->sleeping, 0);
    return strokes;
}

static uint32_t wait_with(struct bell *bell, _Atomic uint32_t *word, uint32_t seen, uint32_t spin_us, uint64_t timeout_us) {
    atomic_store(word, 1);
    uint32_t strokes = bell_wait(bell, seen, spin_us, timeout_us);
    atomic_exchange(word, 0);
    return strokes;
}

uint32_t bell_wait_skipping_completions(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us) {
    return wait_with(bell, &bell->skip_completion_wakeups, seen, spin_us, timeout_us);
}

uint32_t bell_wait_skipping_best_effort(struct bell *bell, uint32_t seen, uint32_t spin_us, uint64_t timeout_us) {
    return wait_with(bell, &bell->skip_best_effort_wakeups, seen, spin_us, timeout_us);
}
