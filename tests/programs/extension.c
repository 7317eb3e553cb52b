/* An extension module whose C functions call Python from frames of many shapes, or spin.

   It declares what it needs of CPython's stable ABI itself: one file serves every version, and no headers are wanted. */
#include <alloca.h>
#include <signal.h>
#include <stdlib.h>

typedef struct object PyObject;
typedef PyObject *function(PyObject *, PyObject *);
struct method { const char *name; function *call; int flags; const char *doc; };
struct module {
    long refcount;
    void *type, *init;
    long index;
    PyObject *copy;
    const char *name, *doc;
    long size;
    struct method *methods;
    void *slots, *traverse, *clear, *free;
};
extern PyObject *PyObject_CallObject(PyObject *, PyObject *);
extern PyObject *PyModule_Create2(struct module *, int);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern void Py_DecRef(PyObject *);
extern void Py_IncRef(PyObject *);
extern PyObject *PyErr_Occurred(void);
extern PyObject _Py_NoneStruct;

/* What follows a call must happen after it: no call here is a jump. */
#define KEEP(what) __asm__ volatile("" : : "r"(what) : "memory")
#define STEP __attribute__((noinline)) static PyObject *

STEP innermost(PyObject *callee)
{
    PyObject *result = PyObject_CallObject(callee, NULL);
    KEEP(result);
    return result;
}

STEP three_deep(PyObject *callee)
{
    PyObject *result = innermost(callee);
    KEEP(result);
    return result;
}

STEP plain(PyObject *self, PyObject *callee)
{
    PyObject *result = three_deep(callee);
    KEEP(result);
    return result;
}

/* The stack is realigned in the prologue: the frame hangs on rbp, or on a register of its own. */
STEP aligned(PyObject *self, PyObject *callee)
{
    char room[256] __attribute__((aligned(64)));
    KEEP(room);
    PyObject *result = innermost(callee);
    KEEP(room);
    return result;
}

STEP aligned_and_grown(PyObject *self, PyObject *callee)
{
    char room[256] __attribute__((aligned(64)));
    KEEP(room);
    char *more = alloca(((long)callee & 255) + 64);
    KEEP(more);
    PyObject *result = innermost(callee);
    KEEP(more);
    return result;
}

STEP grown(PyObject *self, PyObject *callee)
{
    char *room = alloca(((long)callee & 1023) + 64);
    KEEP(room);
    PyObject *result = innermost(callee);
    KEEP(room);
    return result;
}

STEP large(PyObject *self, PyObject *callee)
{
    char room[50000];
    KEEP(room);
    PyObject *result = innermost(callee);
    KEEP(room);
    return result;
}

/* Nine arguments: some travel on the stack, which moves around the call. */
__attribute__((noinline)) static PyObject *nine(long a, long b, long c, long d, long e, long f, long g, long h, PyObject *callee)
{
    PyObject *result = innermost(callee);
    KEEP(a + b + c + d + e + f + g + h);
    return result;
}

STEP many_arguments(PyObject *self, PyObject *callee)
{
    PyObject *result = nine(1, 2, 3, 4, 5, 6, 7, 8, callee);
    KEEP(result);
    return result;
}

/* Every register that a callee must keep is in use. */
STEP many_registers(PyObject *self, PyObject *callee)
{
    long a = (long)callee, b = a * 3, c = b ^ 5, d = c * 7, e = d ^ 9, f = e * 11;
    __asm__ volatile("" : "+r"(a), "+r"(b), "+r"(c), "+r"(d), "+r"(e), "+r"(f));
    PyObject *result = innermost(callee);
    __asm__ volatile("" : : "r"(a), "r"(b), "r"(c), "r"(d), "r"(e), "r"(f));
    return result;
}

static PyObject *callee_of_sort;

__attribute__((noinline)) static int compare(const void *a, const void *b)
{
    if (!PyErr_Occurred()) {
        PyObject *result = PyObject_CallObject(callee_of_sort, NULL);
        if (result)
            Py_DecRef(result);
    }
    return *(const int *)a - *(const int *)b;
}

STEP sorted_by_c(PyObject *self, PyObject *callee)
{
    int numbers[4] = {3, 1, 2, 0};
    callee_of_sort = callee;
    qsort(numbers, 4, sizeof *numbers, compare);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

__attribute__((noinline)) static void turn(long turns)
{
    for (long left = turns; left; left--)
        KEEP(left);
}

STEP without_gil(PyObject *self, PyObject *none)
{
    void *state = PyEval_SaveThread();
    turn(200000);
    PyEval_RestoreThread(state);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

STEP with_gil(PyObject *self, PyObject *none)
{
    turn(200000);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

__attribute__((noinline)) static void handler(int number)
{
    turn(200000);
    KEEP(number);
}

/* The handler runs where the thread returns from the system call that sends the signal. */
STEP interrupted(PyObject *self, PyObject *none)
{
    signal(SIGUSR2, handler);
    raise(SIGUSR2);
    Py_IncRef(&_Py_NoneStruct);
    return &_Py_NoneStruct;
}

enum { NO_ARGUMENT = 4, ONE_ARGUMENT = 8 };

static struct method methods[] = {
    {"plain", plain, ONE_ARGUMENT, NULL},
    {"aligned", aligned, ONE_ARGUMENT, NULL},
    {"aligned_and_grown", aligned_and_grown, ONE_ARGUMENT, NULL},
    {"grown", grown, ONE_ARGUMENT, NULL},
    {"large", large, ONE_ARGUMENT, NULL},
    {"many_arguments", many_arguments, ONE_ARGUMENT, NULL},
    {"many_registers", many_registers, ONE_ARGUMENT, NULL},
    {"sorted_by_c", sorted_by_c, ONE_ARGUMENT, NULL},
    {"without_gil", without_gil, NO_ARGUMENT, NULL},
    {"with_gil", with_gil, NO_ARGUMENT, NULL},
    {"interrupted", interrupted, NO_ARGUMENT, NULL},
    {0},
};

static struct module module = {.refcount = 1, .name = "extension", .size = -1, .methods = methods};

__attribute__((visibility("default"))) PyObject *PyInit_extension(void)
{
    return PyModule_Create2(&module, 1013);
}
