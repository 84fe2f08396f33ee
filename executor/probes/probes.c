/* What the profiler asks of the machine: one core's peak, the speed of memory, and load that disturbs other cores. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <time.h>

#define LINE_BYTES 64
#define CHUNK_LINES 256 /* 16 KiB between two looks at the clock: the load is even over a layer of a few microseconds */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* Independent multiply-adds in `COUNT` registers: enough to hide the latency of two units, few enough not to spill. */
#define DEFINE_MULTIPLY_ADD(NAME, LANES, COUNT, FEATURES)                                   \
    __attribute__((target(FEATURES))) static double NAME(long rounds, volatile float *io) { \
        typedef float vector __attribute__((vector_size(4 * LANES)));                       \
        vector factor = {0}, sums[COUNT];                                                   \
        factor += io[0];                                                                    \
        _Pragma("GCC unroll 24") for (int i = 0; i < COUNT; i++) sums[i] = factor + (float)i; \
        for (long round = 0; round < rounds; round++) {                                     \
            _Pragma("GCC unroll 24") for (int i = 0; i < COUNT; i++) sums[i] = sums[i] * factor + factor; \
        }                                                                                   \
        _Pragma("GCC unroll 24") for (int i = 0; i < COUNT; i++) io[1] = sums[i][0];        \
        return 2.0 * LANES * COUNT * (double)rounds;                                        \
    }

DEFINE_MULTIPLY_ADD(multiply_add_16, 16, 24, "avx512f")
DEFINE_MULTIPLY_ADD(multiply_add_8, 8, 12, "avx2,fma")
DEFINE_MULTIPLY_ADD(multiply_add_4, 4, 12, "sse2")

static PyObject *multiply_add(PyObject *module, PyObject *arguments) {
    (void)module;
    int lanes;
    long rounds;
    if (!PyArg_ParseTuple(arguments, "il", &lanes, &rounds)) return NULL;
    __builtin_cpu_init();
    int supported = lanes == 16   ? __builtin_cpu_supports("avx512f")
                    : lanes == 8 ? __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                 : lanes == 4;
    if (!supported) return PyErr_Format(PyExc_ValueError, "no vectors of %d numbers on this machine", lanes);
    volatile float io[2] = {0.5f, 0};
    double flops;
    int64_t begin_ns, end_ns;
    Py_BEGIN_ALLOW_THREADS;
    begin_ns = now_ns();
    flops = lanes == 16 ? multiply_add_16(rounds, io) : lanes == 8 ? multiply_add_8(rounds, io) : multiply_add_4(rounds, io);
    end_ns = now_ns();
    Py_END_ALLOW_THREADS;
    return Py_BuildValue("dL", flops, (long long)(end_ns - begin_ns));
}

/* Half a line: wider than a register a compiler keeps the sums below in memory, and reads half as fast from any cache. */
typedef uint64_t half __attribute__((vector_size(LINE_BYTES / 2), aligned(8)));

/* Read everything, four streams of results, so that nothing but memory sets the pace. */
__attribute__((target_clones("avx2", "default"))) static int64_t read_ns(const half *halves, long count) {
    int64_t begin_ns = now_ns();
    half a = {0}, b = {0}, c = {0}, d = {0};
    for (long i = 0; i + 4 <= count; i += 4) a ^= halves[i], b ^= halves[i + 1], c ^= halves[i + 2], d ^= halves[i + 3];
    a ^= b ^ c ^ d;
    __asm__ volatile("" ::"m"(a));
    return now_ns() - begin_ns;
}

static PyObject *read_memory(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer buffer;
    if (!PyArg_ParseTuple(arguments, "y*", &buffer)) return NULL;
    int64_t time_ns;
    Py_BEGIN_ALLOW_THREADS;
    time_ns = read_ns(buffer.buf, buffer.len / (LINE_BYTES / 2));
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&buffer);
    return PyLong_FromLongLong(time_ns);
}

/* Change memory line by line, a few lines at a time, then idle so long that work is `share` percent of the time. */
static uint64_t disturb_for(volatile uint64_t *words, uint64_t lines, uint64_t at, int share, int64_t slice_ns) {
    int64_t begin_ns = now_ns();
    for (int64_t start_ns = begin_ns; start_ns - begin_ns < slice_ns; start_ns = now_ns()) {
        for (int i = 0; i < CHUNK_LINES; i++) {
            at = at + 1 < lines ? at + 1 : 0;
            words[at * (LINE_BYTES / 8)]++;
        }
        int64_t stop_ns = start_ns + (now_ns() - start_ns) * 100 / share;
        while (now_ns() < stop_ns) __builtin_ia32_pause();
    }
    return at;
}

static PyObject *disturb(PyObject *module, PyObject *arguments) {
    (void)module;
    Py_buffer buffer;
    int share;
    long long slice_us;
    unsigned long long at;
    if (!PyArg_ParseTuple(arguments, "w*KiL", &buffer, &at, &share, &slice_us)) return NULL;
    uint64_t lines = (uint64_t)buffer.len / LINE_BYTES;
    if (share < 1 || share > 100 || lines < 1) {
        PyBuffer_Release(&buffer);
        return PyErr_Format(PyExc_ValueError, "share must be 1 to 100 and memory at least a line");
    }
    Py_BEGIN_ALLOW_THREADS;
    at = disturb_for(buffer.buf, lines, at, share, slice_us * 1000);
    Py_END_ALLOW_THREADS;
    PyBuffer_Release(&buffer);
    return PyLong_FromUnsignedLongLong(at);
}

static PyMethodDef methods[] = {
    {"multiply_add", multiply_add, METH_VARARGS, NULL},
    {"read_memory", read_memory, METH_VARARGS, NULL},
    {"disturb", disturb, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_probes", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__probes(void) { return PyModule_Create(&definition); }
