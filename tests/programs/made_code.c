/* The list of images that debuggers read (GDB's JIT interface), as a just-in-time compiler has it in its library. */

#include <stdint.h>
#include <stdlib.h>

struct entry {
    struct entry *next, *before;
    const char *image;
    uint64_t size;
};

struct {
    uint32_t version, action;
    struct entry *relevant, *first;
} __jit_debug_descriptor = {1, 0, NULL, NULL};

__attribute__((noinline)) void __jit_debug_register_code(void) { __asm__ volatile("" ::: "memory"); }

void tell(const char *image, uint64_t size) {
    struct entry *entry = calloc(1, sizeof *entry);
    entry->image = image;
    entry->size = size;
    entry->next = __jit_debug_descriptor.first;
    if (entry->next) entry->next->before = entry;
    __jit_debug_descriptor.first = __jit_debug_descriptor.relevant = entry;
    __jit_debug_descriptor.action = 1;
    __jit_debug_register_code();
}

/* Calls what it has told of, as a library does that includes its just-in-time compiler. */
long run(long (*function)(long), long rounds) {
    return function(rounds) + 1;
}
