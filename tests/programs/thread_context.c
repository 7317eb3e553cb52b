// OpenTelemetry's thread context (OTEP 4947), as a library that publishes it, as a program that has one loaded, or as both:
// cc -DLIBRARY -shared -fPIC, cc -DMAIN, cc -DLIBRARY -DMAIN -rdynamic; cc -DMAIN -DLOADS loads the one that its argument names.
// -DPAD=BYTES makes the library's block larger.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct record {
    uint8_t trace_id[16];
    uint8_t span_id[8];
    uint8_t valid;
    uint8_t trace_flags;
    uint16_t attrs_data_size;
};

#ifndef PAD
#define PAD 1
#endif

#ifdef LIBRARY
// What lies beside it, and how that is aligned, must not matter.
__thread char before[PAD] __attribute__((aligned(64))) = {1};
__thread struct record *otel_thread_ctx_v1;
__thread char after[PAD];

// Every byte of the ids is the number; returns where the variable is.
uint64_t publish(unsigned number) {
    struct record *record = calloc(1, sizeof *record);
    memset(record->trace_id, number, sizeof record->trace_id);
    memset(record->span_id, number, sizeof record->span_id);
    record->valid = 1;
    otel_thread_ctx_v1 = record;
    return (uint64_t)&otel_thread_ctx_v1;
}

uint64_t thread_pointer(void) { return (uint64_t)__builtin_thread_pointer(); }
#endif

#ifdef MAIN
#include <pthread.h>

#ifdef LOADS
#include <dlfcn.h>
static uint64_t (*publish)(unsigned number);
static uint64_t (*thread_pointer)(void);
#else
uint64_t publish(unsigned number);
uint64_t thread_pointer(void);
#endif

enum { THREADS = 4 };
static struct { uint64_t tp, at; } told[THREADS];
static pthread_barrier_t loaded, barrier;

static void *run(void *argument) {
    unsigned number = (unsigned)(uintptr_t)argument;
    if (number != THREADS - 1)
        pthread_barrier_wait(&loaded);
    told[number].tp = thread_pointer();
    if (number > 0)
        told[number].at = publish(number);
    pthread_barrier_wait(&barrier);
    pthread_barrier_wait(&barrier);
    return 0;
}

static void start(uintptr_t number) {
    pthread_t thread;
    if (pthread_create(&thread, 0, run, (void *)number) != 0)
        abort();
}

// Thread 0 publishes nothing, thread 1 is the main one, and the last one starts when the library has been loaded.
int main(int argc, char **argv) {
    pthread_barrier_init(&loaded, 0, THREADS - 1);
    pthread_barrier_init(&barrier, 0, THREADS);
    start(0);
    start(2);
#ifdef LOADS
    void *library = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    publish = (uint64_t (*)(unsigned))dlsym(library, "publish");
    thread_pointer = (uint64_t (*)(void))dlsym(library, "thread_pointer");
#else
    (void)argc, (void)argv;
#endif
    pthread_barrier_wait(&loaded);
    start(3);
    told[1].tp = thread_pointer();
    told[1].at = publish(1);
    pthread_barrier_wait(&barrier);
    printf("{\"threads\": [");
    for (unsigned number = 0; number < THREADS; number++)
        printf("%s{\"tp\": %llu, \"at\": %llu, \"number\": %u}", number ? ", " : "", (unsigned long long)told[number].tp,
               (unsigned long long)told[number].at, number);
    printf("]}\n");
    fflush(stdout);
    getchar();
    return 0;
}
#endif
