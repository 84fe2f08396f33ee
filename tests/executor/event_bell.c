/* Producers that ring a bell with an eventfd, a consumer that arms it and polls: nothing is lost, and who finds it awake writes nothing.
 *
 * Each producer counts up a word of its own, rings, and waits until the consumer has seen that. usage: event_bell MESSAGES PRODUCERS */
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "../../executor/native/ring.h"

enum { MAX_PRODUCERS = 8, PATIENCE_MS = 20000 };

static struct bell bell;
static struct { _Alignas(64) _Atomic uint32_t sent, seen; } words[MAX_PRODUCERS];
static uint32_t messages;

static void *produce(void *argument) {
    uint32_t number = (uint32_t)(uintptr_t)argument;
    for (uint32_t i = 1; i <= messages; i++) {
        atomic_store(&words[number].sent, i);
        bell_ring(&bell);
        while (i % 3 == 0 && atomic_load(&words[number].seen) < i) sched_yield(); /* the consumer sleeps now and then */
    }
    return NULL;
}

static uint32_t read_words(uint32_t producers) {
    uint32_t found = 0;
    for (uint32_t i = 0; i < producers; i++) {
        uint32_t sent = atomic_load(&words[i].sent);
        found += sent - atomic_exchange(&words[i].seen, sent);
    }
    return found;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    messages = (uint32_t)atoi(arguments[1]);
    uint32_t producers = (uint32_t)atoi(arguments[2]), found = 0, sleeps = 0, wakes = 0;
    int descriptor = eventfd(0, EFD_NONBLOCK);
    bell.event_fd = (uint32_t)descriptor;
    pthread_t threads[MAX_PRODUCERS];
    for (uint32_t i = 0; i < producers; i++) pthread_create(&threads[i], NULL, produce, (void *)(uintptr_t)i);
    while (found < messages * producers) {
        uint32_t more = read_words(producers);
        if (!more) {
            bell_arm(&bell);
            more = read_words(producers);
        }
        found += more;
        if (more) continue;
        struct pollfd waited = {descriptor, POLLIN, 0};
        sleeps++;
        if (poll(&waited, 1, PATIENCE_MS) != 1) return fprintf(stderr, "nobody woke the consumer: %u of %u\n", found, messages * producers), 1;
        uint64_t value;
        if (read(descriptor, &value, sizeof value) != sizeof value) return fprintf(stderr, "readable, but empty\n"), 1;
        wakes += (uint32_t)value;
    }
    for (uint32_t i = 0; i < producers; i++) pthread_join(threads[i], NULL);
    if (atomic_load(&bell.strokes) != messages * producers) return fprintf(stderr, "%u strokes\n", bell.strokes), 1;
    uint64_t unread = 0;
    if (read(descriptor, &unread, sizeof unread) != sizeof unread) unread = 0;
    printf("sleeps %u wakes %u unread %u\n", sleeps, wakes, (unsigned)unread);
    return 0;
}
