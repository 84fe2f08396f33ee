/* Prints the bytes of each structure that Python is told of, after each of its fields has been given a number, and each constant. */
#include "layout.h"

#include <stdio.h>
#include <string.h>

static void fill(void *field, size_t size_bytes, unsigned number) {
    for (size_t i = 0; i < size_bytes; i++) ((unsigned char *)field)[i] = (unsigned char)(number + i % 3);
}

static void print(const void *object, size_t size_bytes) {
    for (size_t i = 0; i < size_bytes; i++) printf("%02x", ((const unsigned char *)object)[i]);
    putchar('\n');
}

#define FILL(TYPE, NAME, DIMENSION) fill((void *)&object.NAME, sizeof object.NAME, ++number);
#define SHOW(STRUCT, FIELDS)                       \
    {                                              \
        static struct STRUCT object;               \
        unsigned number = 0;                       \
        FIELDS(FILL)                               \
        printf("struct %s ", #STRUCT);             \
        print((const void *)&object, sizeof object); \
    }
#define SHOW_NAME(NAME) printf("value %s %ld\n", #NAME, (long)(NAME));
#define SHOW_LIMIT(NAME, VALUE) SHOW_NAME(NAME)

int main(void) {
    STRUCTS(SHOW)
    LIMITS(SHOW_LIMIT)
    ENUMERATORS(SHOW_NAME)
    return 0;
}
