#include "instance.h"

#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "wait.h"

enum { PREFIX_BYTES = 16, MOST_DIGITS = 20 }; /* python_backend/messages.py: sizes of header and payload */

static bool are_whole(const char *text, const struct elements *elements) {
    const char *at = text + elements->at;
    uint64_t left = elements->size;
    for (uint64_t i = 0; i < elements->count; i++) {
        uint32_t size;
        if (left < sizeof size) return false;
        memcpy(&size, at, sizeof size);
        left -= sizeof size;
        if (size > left) return false;
        at += sizeof size + size;
        left -= size;
    }
    return left == 0;
}

/* Where what a request has for itself ends: a line break and `common` follow. NULL: it is another kind of request. */
static const char *end_of_own(const struct handover *handover, const char *told) {
    if (handover->told_bytes <= handover->common.size) return NULL;
    const char *end = told + handover->told_bytes - handover->common.size - 1;
    return *end == '\n' && memcmp(end + 1, handover->common.bytes, handover->common.size) == 0 ? end : NULL;
}

static bool has_ended(const struct instance *instance) {
    struct pollfd process = {instance->process, POLLIN, 0};
    return poll(&process, 1, 0) != 0;
}

/* Whether it can begin at once, in memory that is large enough. */
static bool is_free(const struct instance *instance, const struct handover *handover) {
    return instance->socket >= 0 && instance->status && !atomic_load(&instance->status[0]) && !atomic_load(&instance->status[1]) &&
           instance->memory_bytes && handover->needed_bytes <= instance->memory_bytes && !has_ended(instance);
}

/* Writes the message; returns its size. */
static size_t write_message(const struct handover *handover, const char *own, size_t own_bytes, uint64_t number, char *message) {
    char digits[MOST_DIGITS + 1];
    size_t digit_count = (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)number);
    uint64_t sizes[2] = {handover->header.size, digit_count + 1 + own_bytes};
    char *at = message;
    memcpy(at, sizes, sizeof sizes);
    memcpy(at += sizeof sizes, handover->header.bytes, handover->header.size);
    memcpy(at += handover->header.size, digits, digit_count);
    *(at += digit_count) = '\n';
    memcpy(++at, own, own_bytes);
    return (size_t)(at - message) + own_bytes;
}

/* False: nothing is sent. What is sent in part ends the connection, as the wait for its answer finds. */
static bool send_message(const struct instance *instance, const char *message, size_t size) {
    ssize_t sent = send(instance->socket, message, size, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) return false;
    if ((size_t)sent < size) shutdown(instance->socket, SHUT_RDWR);
    return true;
}

/* What the CPU clock of its process says, as clock_getcpuclockid finds it; UINT64_MAX: there is none. */
static uint64_t read_clock_ns(int32_t pid) {
    enum { ALL_THREADS = 2 };
    struct timespec time;
    if (clock_gettime((clockid_t)((~(uint32_t)pid << 3) | ALL_THREADS), &time)) return UINT64_MAX;
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

_Thread_local const _Atomic uint32_t *instance_control;

int instance_poll(int socket, uint64_t most_ms) {
    for (;;) {
        struct pollfd answers = {socket, POLLIN, 0};
        uint64_t some_ms = instance_control && most_ms > TOLD_LOOK_MS ? TOLD_LOOK_MS : most_ms;
        int ready = poll(&answers, 1, (int)some_ms);
        most_ms -= some_ms;
        if (ready || !most_ms || instance_must_leave()) return ready;
    }
}

/* Whether a message comes while it computes, as far as its own process shows, and its core is not wanted. */
static bool wait_for_message(const struct instance *instance, uint64_t timeout_ns, struct exchange *exchange) {
    uint64_t look_ms = LEAST_LOOK_MS;
    for (;;) {
        int ready = instance_poll(instance->socket, look_ms);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return false;
        if (ready < 0) continue;
        if (instance_must_leave()) return false;
        uint64_t now = now_ns(), computed_ns = read_clock_ns(instance->pid);
        if (now - exchange->begin_ns > timeout_ns || computed_ns == UINT64_MAX) return false;
        uint64_t more_ns = computed_ns - exchange->computed_ns;
        if (exchange->looked_ns && more_ns * COMPUTING_PARTS <= now - exchange->looked_ns) return false;
        look_ms = (now - exchange->begin_ns) / 1000000;
        if (look_ms < LEAST_LOOK_MS) look_ms = LEAST_LOOK_MS;
        if (look_ms > MOST_INSTANCE_LOOK_MS) look_ms = MOST_INSTANCE_LOOK_MS;
        exchange->looked_ns = now;
        exchange->computed_ns = computed_ns;
    }
}

/* Whether what has come is the answer that is expected, and nothing else. */
static bool is_plain(const struct handover *handover, const struct exchange *exchange) {
    char digits[MOST_DIGITS + 1];
    size_t digit_count = (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)exchange->number);
    uint64_t sizes[2] = {handover->answer.size, digit_count};
    const char *text = exchange->received + sizeof sizes;
    return exchange->received_bytes == sizeof sizes + handover->answer.size + digit_count &&
           memcmp(exchange->received, sizes, sizeof sizes) == 0 && memcmp(text, handover->answer.bytes, handover->answer.size) == 0 &&
           memcmp(text + handover->answer.size, digits, digit_count) == 0;
}

static void copy_all(const struct move *moves, uint32_t count, const char *from, char *to) {
    for (uint32_t i = 0; i < count; i++) memcpy(to + moves[i].to, from + moves[i].from, moves[i].size);
}

bool handover_fits(const struct handover *handover) {
    uint64_t more = PREFIX_BYTES + MOST_DIGITS + 1;
    return handover->header.size + handover->told_bytes + more <= MESSAGE_BYTES && handover->answer.size + more <= MESSAGE_BYTES;
}

enum handed handover_run(const struct instance *instance, const struct handover *handover, const char *request, char *block,
                         struct exchange *exchange) {
    char message[MESSAGE_BYTES];
    const char *told = request + handover->told_at, *end = end_of_own(handover, told);
    if (!end || !is_free(instance, handover)) return NOT_HANDED;
    for (uint32_t i = 0; i < handover->element_count; i++) {
        if (!are_whole(request, &handover->elements[i])) return NOT_HANDED;
    }
    exchange->begin_ns = now_ns();
    exchange->number = exchange->begin_ns << NUMBER_CORE_BITS | (handover->core & ((1u << NUMBER_CORE_BITS) - 1));
    exchange->looked_ns = exchange->computed_ns = exchange->received_bytes = 0;
    copy_all(handover->inputs, handover->input_count, request, instance->memory);
    size_t size = write_message(handover, told, (size_t)(end - told), exchange->number, message);
    if (!send_message(instance, message, size)) return NOT_HANDED;
    if (!wait_for_message(instance, handover->timeout_ns, exchange)) return NOT_ANSWERED;
    ssize_t received = recv(instance->socket, exchange->received, sizeof exchange->received, MSG_DONTWAIT);
    exchange->received_bytes = received > 0 ? (uint32_t)received : 0;
    if (!is_plain(handover, exchange)) return NOT_ANSWERED;
    copy_all(handover->outputs, handover->output_count, instance->memory, block);
    memcpy(block + handover->status_at, handover->status.bytes, handover->status.size);
    return ANSWERED;
}
