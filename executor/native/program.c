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

void program_close(struct program *program) {
    if (program->library) dlclose(program->library);
    if (program->weights) munmap(program->weights, program->weights_bytes);
    free(program->layers);
    free(program->inputs);
    free(program->outputs);
    memset(program, 0, sizeof *program);
}
