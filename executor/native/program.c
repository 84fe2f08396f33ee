#include "program.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char *map_weights(struct program *program, const char *path) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return strerror(errno);
    struct stat status;
    const char *error = NULL;
    if (fstat(fd, &status) != 0) {
        error = strerror(errno);
    } else if (status.st_size > 0) { /* a model may have no weights at all */
        void *map = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (map == MAP_FAILED) {
            error = strerror(errno);
        } else {
            program->weights = map;
            program->weights_bytes = (size_t)status.st_size;
        }
    }
    close(fd);
    return error;
}

/* Kernels of low precision may use the tiles of AMX, for which a process has to ask. Older systems and processors refuse. */
static void request_tiles(void) {
    enum { ARCH_REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    syscall(SYS_arch_prctl, ARCH_REQUEST_PERMISSION, TILE_DATA);
}

const char *program_open(struct program *program, const char *kernels, const char *weights) {
    const char *error = map_weights(program, weights);
    if (error) return error;
    if (program->weights) {
        /* Both are advice: huge pages only where the file system has them; page tables filled now instead of in the first query. */
        madvise(program->weights, program->weights_bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_READ
        madvise(program->weights, program->weights_bytes, MADV_POPULATE_READ);
#endif
    }
    request_tiles();
    program->library = dlopen(kernels, RTLD_NOW | RTLD_LOCAL);
    return program->library ? NULL : dlerror();
}

static void set_number(struct program *program, const struct varying_place *place, uint64_t number) {
    struct layer *layer = &program->layers[place->layer];
    struct version *version = &layer->versions[0];
    switch (place->kind) {
        case VARYING_ARGUMENTS: layer->argument_count = (uint32_t)number; break;
        case VARYING_OFFSET: layer->arguments[place->index].offset = number; break;
        case VARYING_KERNEL: version->one.run = program->instances.kernels[number]; break;
        case VARYING_TASKS: version->one.tasks = (uint32_t)number; break;
        case VARYING_BATCH_KERNEL: version->batch.run = program->instances.kernels[number]; break;
        case VARYING_BATCH_TASKS: version->batch.tasks = (uint32_t)number; break;
        case VARYING_MAX_RANKS: layer->max_ranks = (uint32_t)number; break;
        case VARYING_ROW_NS: layer->row_ns = (uint32_t)number; break;
        case VARYING_INPUT_BYTES: program->inputs[place->index].row_bytes = number; break;
        case VARYING_OUTPUT_BYTES: program->outputs[place->index].row_bytes = number; break;
    }
}

uint64_t program_staged_bytes(const struct tensor *tensors, uint32_t count) {
    uint64_t size_bytes = 0;
    for (uint32_t i = 0; i < count; i++) size_bytes += tensors[i].staged == NOT_STAGED ? 0 : tensors[i].row_bytes;
    return size_bytes;
}

bool program_choose(struct program *program, uint64_t number) {
    struct instances *instances = &program->instances;
    if (!instances->count) return true;
    if (number >= instances->count) return false;
    if (number == instances->current) return true;
    const uint64_t *numbers = instances->numbers + number * instances->place_count;
    for (uint32_t i = 0; i < instances->place_count; i++) set_number(program, &instances->places[i], numbers[i]);
    program->pack_bytes = program_staged_bytes(program->inputs, program->input_count);
    program->unpack_bytes = program_staged_bytes(program->outputs, program->output_count);
    instances->current = (uint32_t)number;
    return true;
}

void program_close(struct program *program) {
    if (program->library) dlclose(program->library);
    if (program->weights) munmap(program->weights, program->weights_bytes);
    free(program->layers);
    free(program->inputs);
    free(program->outputs);
    free(program->instances.places);
    free(program->instances.numbers);
    free(program->instances.kernels);
    memset(program, 0, sizeof *program);
}
