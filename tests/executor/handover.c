/* Hands requests over to an instance that a thread plays, in all ways in which it may answer.
 *
 * usage: handover: says which way went wrong. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "../../executor/native/instance.h"

enum { MEMORY_BYTES = 256, FRAME_BYTES = 256, TOLD_AT = 128, STATUS_AT = 200, ROUNDS = 300 };
enum way { PLAIN, OTHER_TEXT, OTHER_NUMBER, IN_TWO, WITH_ANOTHER, SLOW, WAITS, GONE, WAYS };

static const char header[] = "{\"run\":[]}", common[] = "{\"common\":1}", answer[] = "{\"done\":[]}", status[] = "{}";
static char memory[MEMORY_BYTES];
static int sockets[2];

static void compute(long ms) {
    struct timespec begin, now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    do clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000 < ms);
}

static size_t write_answer(char *message, const char *text, const char *number) {
    uint64_t sizes[2] = {strlen(text), strlen(number)};
    memcpy(message, sizes, sizeof sizes);
    memcpy(message + sizeof sizes, text, sizes[0]);
    memcpy(message + sizeof sizes + sizes[0], number, sizes[1]);
    return sizeof sizes + sizes[0] + sizes[1];
}

static void fail(const char *what, int way) {
    fprintf(stderr, "%s, way %d\n", what, way);
    exit(1);
}

static void send_all(const char *bytes, size_t size) {
    if (send(sockets[1], bytes, size, MSG_NOSIGNAL) != (ssize_t)size) fail("no answer is sent", -1);
}

/* Takes one message, whose input it adds one to; answers it in one of the ways. */
static void *play(void *argument) {
    int way = (int)(intptr_t)argument;
    char message[MESSAGE_BYTES], own[MESSAGE_BYTES], number[32], reply[2 * MESSAGE_BYTES];
    ssize_t size = recv(sockets[1], message, sizeof message, 0);
    uint64_t sizes[2];
    memcpy(sizes, message, sizeof sizes);
    if (size != (ssize_t)(sizeof sizes + sizes[0] + sizes[1]) || memcmp(message + sizeof sizes, header, sizes[0])) fail("message", way);
    message[size] = 0;
    if (sscanf(message + sizeof sizes + sizes[0], "%31[0-9]\n%[^\n]", number, own) != 2 || strcmp(own, "{\"id\":7}")) fail("payload", way);
    memory[64] = (char)(memory[0] + 1);
    if (way == SLOW) compute(12);
    if (way == WAITS) usleep(20000);
    if (way == GONE) return shutdown(sockets[1], SHUT_RDWR), NULL;
    size_t length = write_answer(reply, way == OTHER_TEXT ? "{\"done\":[1]}" : answer, way == OTHER_NUMBER ? "1" : number);
    if (way == WITH_ANOTHER) length += write_answer(reply + length, answer, "2");
    if (way == IN_TWO) {
        send_all(reply, 9);
        usleep(5000);
        send_all(reply + 9, length - 9);
    } else {
        send_all(reply, length);
    }
    return NULL;
}

static void write_request(char *request, char value) {
    memset(request, 0, FRAME_BYTES);
    request[0] = value;
    memcpy(request + 32, "\1\0\0\0a\2\0\0\0bc", 11);
    snprintf(request + TOLD_AT, FRAME_BYTES - TOLD_AT, "{\"id\":7}\n%s", common);
}

static void run(const struct instance *instance, const struct handover *handover, int way, char value) {
    char request[FRAME_BYTES], block[FRAME_BYTES] = {0};
    struct exchange exchange;
    pthread_t thread;
    write_request(request, value);
    pthread_create(&thread, NULL, play, (void *)(intptr_t)way);
    enum handed handed = handover_run(instance, handover, request, block, &exchange);
    pthread_join(thread, NULL);
    if (handed == NOT_HANDED) fail("it is not handed over", way);
    if (way == PLAIN && handed == ANSWERED && (block[0] != (char)(value + 1) || memcmp(block + STATUS_AT, status, 2))) fail("the answer", way);
    if (way == SLOW || way == PLAIN) { /* others may keep it from computing for some milliseconds */
        while (handed == NOT_ANSWERED && recv(instance->socket, request, sizeof request, MSG_DONTWAIT) > 0) {}
        return;
    }
    if (handed != NOT_ANSWERED) fail("it is no plain answer", way);
    if (exchange.number != (exchange.begin_ns << NUMBER_CORE_BITS | 3)) fail("the number", way);
    if (way == GONE || (way == WAITS && exchange.received_bytes)) return;
    size_t received = exchange.received_bytes;
    while (recv(instance->socket, request, sizeof request, MSG_DONTWAIT) > 0) received++;
    if (!received) fail("nothing has come", way);
}

/* What must not be handed over. */
static void refuse(const struct instance *instance, const struct handover *handover, const char *request, const char *what) {
    char block[FRAME_BYTES];
    struct exchange exchange;
    if (handover_run(instance, handover, request, block, &exchange) != NOT_HANDED) fail(what, -1);
    if (recv(sockets[1], block, sizeof block, MSG_DONTWAIT) > 0) fail(what, -2);
}

int main(void) {
    char request[FRAME_BYTES];
    int lives[2];
    _Atomic uint8_t shown[2] = {0, 0};
    struct move input = {0, 0, 1}, output = {64, 0, 1};
    struct elements elements = {32, 11, 2};
    struct handover handover = {
        .header = {header, sizeof header - 1}, .common = {common, sizeof common - 1}, .answer = {answer, sizeof answer - 1},
        .status = {status, 2}, .told_at = TOLD_AT, .told_bytes = 8 + 1 + sizeof common - 1, .status_at = STATUS_AT, .needed_bytes = 65,
        .timeout_ns = UINT64_C(10000000000), .inputs = &input, .outputs = &output, .elements = &elements, .input_count = 1,
        .output_count = 1, .element_count = 1, .core = 3};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) || pipe(lives)) return 2;
    struct instance instance = {sockets[0], lives[0], getpid(), memory, MEMORY_BYTES, shown};
    if (!handover_fits(&handover)) fail("it does not fit", -1);
    for (int round = 0; round < ROUNDS; round++) run(&instance, &handover, PLAIN, (char)round);
    for (int way = OTHER_TEXT; way < GONE; way++) run(&instance, &handover, way, 1);

    write_request(request, 1);
    for (int i = 0; i < 2; i++) {
        atomic_store(&shown[i], 1);
        refuse(&instance, &handover, request, "it is occupied, or rests");
        atomic_store(&shown[i], 0);
    }
    instance.memory_bytes = 64;
    refuse(&instance, &handover, request, "the memory is too small");
    instance.memory_bytes = MEMORY_BYTES;
    request[TOLD_AT + 10] = '?';
    refuse(&instance, &handover, request, "it is told something else");
    for (int at = 32; at <= 37; at += 5) { /* the lengths of both elements */
        for (int length = 0; length < 256; length++) {
            write_request(request, 1);
            bool is_right = request[at] == (char)length;
            request[at] = (char)length;
            if (!is_right) refuse(&instance, &handover, request, "an element is cut off");
        }
    }
    write_request(request, 1);
    instance.status = NULL;
    refuse(&instance, &handover, request, "it has shown nothing yet");
    instance.status = shown;
    close(lives[1]); /* as a process that ends */
    refuse(&instance, &handover, request, "it has ended");
    if (pipe(lives)) return 2;
    instance.process = lives[0];
    run(&instance, &handover, GONE, 1);
    refuse(&instance, &handover, request, "nobody is at the other end");
    return 0;
}
