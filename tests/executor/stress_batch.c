/* Batches of the stress test: random requests, cut anywhere into gangs; and what must be true of them afterwards. */
#include "stress.h"

struct gang gangs[GANGS];
struct lease leases[GANGS];
struct request requests[REQUESTS];
uint32_t gang_count, request_count;
char *io[FRONT_ENDS];
unsigned joined, split;

/* Where a model's last tensor is; its others have no bytes. A model with more than INLINE_PLACES of them has a list of places. */
static void place_last(char *base, _Atomic uint64_t *places, uint32_t count, uint32_t list_at, uint32_t offset) {
    if (count > INLINE_PLACES) {
        places[0] = list_at;
        places = (_Atomic uint64_t *)(base + list_at);
    }
    for (uint32_t i = 0; i < count; i++) places[i] = i == count - 1 ? offset : 0;
}

static void make_request(uint32_t number, uint32_t first) {
    struct request *request = &requests[number];
    char *base = io[number % FRONT_ENDS];
    uint32_t index = number / FRONT_ENDS, input = HEAP + index * INPUT_SPAN;
    uint32_t output = HEAP + REQUESTS * INPUT_SPAN + index * OUTPUT_SPAN;
    struct slot *table = (struct slot *)base, *slot = table + index;
    *request = (struct request){.table = table, .slot = slot, .rows = 1 + random_below(REQUEST_ROWS), .first = first,
                                .input = base + input, .output = base + output};
    for (uint32_t row = 0; row < request->rows; row++) *(int *)(request->input + row * INPUT_ROW) = (int)(first + row);
    memset(request->output, 0, OUTPUT_SPAN);
    CHECK(slot_acquire(table, index + 1, index) == (long)index, "acquire");
    request->generation = slot_generation(atomic_load(&slot->word));
    slot->rows = request->rows;
    uint32_t lists = LISTS + index * 2 * LIST_BYTES;
    place_last(base, slot->input_offset, program.whole ? 1 : program.input_count, lists, input);
    place_last(base, slot->output_offset, program.whole ? 1 : program.output_count, lists + LIST_BYTES, output);
    slot->input_frame_bytes = slot->output_frame_bytes = 64;
    slot_change(slot, request->generation, 1u << SLOT_FILLING, SLOT_SUBMITTED, STATUS_OK);
}

/* Rows [gang->first, gang->first + gang->rows) of the line, request by request. */
static void make_members(struct gang *gang) {
    uint32_t gang_end = gang->first + gang->rows;
    gang->member_count = 0;
    for (uint32_t i = 0; i < request_count; i++) {
        struct request *request = &requests[i];
        uint32_t end = request->first + request->rows;
        uint32_t from = request->first > gang->first ? request->first : gang->first, to = end < gang_end ? end : gang_end;
        if (from >= to) continue;
        gang->members[gang->member_count++] = (struct member){
            i % FRONT_ENDS, i / FRONT_ENDS, request->generation, from - request->first, to - from, request->parts++};
    }
}

uint32_t make_batch(void) {
    uint32_t rows = 0, first = 0;
    request_count = 1 + random_below(REQUESTS);
    for (uint32_t i = 0; i < request_count; i++) {
        make_request(i, rows);
        rows += requests[i].rows;
    }
    gang_count = program.whole || rows == 1 ? 1 : 1 + random_below(rows < GANGS ? rows : GANGS);
    for (uint32_t i = 0; i < gang_count; i++) {
        uint32_t later = gang_count - 1 - i; /* gangs, with one row each at least */
        uint32_t count = later ? 1 + random_below(rows - first - later) : rows - first;
        gangs[i] = (struct gang){.lease = &leases[i], .first = first, .rows = count};
        make_members(&gangs[i]);
        joined += gangs[i].member_count > 1;
        first += count;
    }
    for (uint32_t i = 0; i < request_count; i++) {
        struct request *request = &requests[i];
        split += request->parts > 1;
        CHECK(slot_start(request->slot, request->generation, request->parts, rows, i == 0), "start");
    }
    return rows;
}

/* Whether it has none of its requests for itself. */
bool is_alone_in_no_request(const struct gang *gang) {
    bool others = true;
    for (uint32_t i = 0; i < gang->member_count; i++) {
        others = others && requests[gang->members[i].slot * FRONT_ENDS + gang->members[i].front_end].parts > 1;
    }
    return others;
}

/* Whether each member's part has been counted. */
void check_parts(const struct gang *gang, bool done) {
    for (uint32_t i = 0; i < gang->member_count; i++) {
        const struct member *member = &gang->members[i];
        struct slot *table = (struct slot *)io[member->front_end];
        bool found = slot_part_is_done(table, table + member->slot, member->generation, member->part);
        CHECK(found == done, "part %u", member->part);
    }
}

/* Every task exactly once, and each step has ended after the one before. */
void check_gang(const struct gang *gang) {
    uint64_t before_ns = gang->lease->start_ns;
    if (program.whole) CHECK(gang->cells[0][0][0].runs == 1, "called %d times", gang->cells[0][0][0].runs);
    for (uint32_t layer = 0; layer < program.layer_count; layer++) {
        for (uint32_t row = 0; row < gang->rows && !program.whole; row++) check_row(gang, layer, row);
        CHECK(gang->lease->layer_end_ns[layer] >= before_ns, "step %u ended early", layer);
        before_ns = gang->lease->layer_end_ns[layer];
    }
}

static const struct gang *gang_of(uint32_t row) {
    const struct gang *gang = gangs;
    while (row >= gang->first + gang->rows) gang++;
    return gang;
}

/* The first request that does not fail stands for the batch. */
static bool leads_batch(const struct request *request) {
    uint32_t first = 0;
    while (fails >> first & 1) first++;
    return request == &requests[first];
}

/* Answered as it must be, with its own outputs. */
void check_request(const struct request *request, uint32_t rows, bool failed) {
    struct slot *slot = request->slot;
    CHECK(slot_wait(slot, 0, 1000000), "not answered");
    CHECK(slot_status(atomic_load(&slot->word)) == (failed ? STATUS_INTERNAL : STATUS_OK), "wrong answer");
    CHECK(slot->batch_rows == rows && (failed || slot->leads == leads_batch(request)), "batch of %u rows", slot->batch_rows);
    CHECK(slot->ranks >= 1 && slot->compute_start_ns > 0 && slot->compute_end_ns >= slot->compute_start_ns, "%u ranks", slot->ranks);
    for (uint32_t row = 0; row < request->rows && !program.whole; row++) {
        uint32_t in_line = request->first + row;
        const int *output = (const int *)(request->output + row * OUTPUT_ROW);
        for (uint32_t layer = 0; layer < program.layer_count; layer++) {
            const struct gang *gang = gang_of(in_line);
            for (uint32_t task = 0; task < gang->tasks[layer][in_line - gang->first]; task++) {
                CHECK(output[layer * TASKS + task] == (int)in_line + 1, "row %u layer %u task %u", in_line, layer, task);
            }
        }
    }
    slot_change(slot, request->generation, 1u << SLOT_DONE, SLOT_FREE, STATUS_OK);
}
