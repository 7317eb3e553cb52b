/* Gives the GIL back for a moment, and tells how long it waited to have it again. Loaded with ctypes.PyDLL. */
#include <time.h>

extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);

static long long now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* Long enough without it that another thread has it. Nanoseconds. */
long long gives_it_back(void)
{
    void *state = PyEval_SaveThread();
    long long begin = now();
    while (now() - begin < 200000)
        ;
    begin = now();
    PyEval_RestoreThread(state);
    return now() - begin;
}
