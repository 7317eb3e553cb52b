/* C code that calls Python and is called by it. Loaded with ctypes.PyDLL, which keeps the GIL. */
#include <pthread.h>

typedef struct object PyObject;
extern int PyGILState_Ensure(void);
extern void PyGILState_Release(int);
extern PyObject *PyObject_CallObject(PyObject *, PyObject *);
extern PyObject *PyObject_CallFunction(PyObject *, const char *, ...);
extern void *PyEval_SaveThread(void);
extern void PyEval_RestoreThread(void *);
extern void Py_IncRef(PyObject *);
extern void Py_DecRef(PyObject *);

static volatile long sink;

__attribute__((noinline)) void without_gil(long turns)
{
    while (turns-- > 0) sink += turns;
}

__attribute__((noinline)) void with_gil(long turns)
{
    while (turns-- > 0) sink += turns;
}

/* Spins with the GIL, then without it. */
void hold(long turns)
{
    with_gil(turns);
}

void release(long turns)
{
    void *state = PyEval_SaveThread();
    without_gil(turns);
    PyEval_RestoreThread(state);
}

/* A thread that Python has not made: it has a thread state only while it is in `call_python`. */
__attribute__((noinline)) static void call_python(PyObject *callee)
{
    int state = PyGILState_Ensure();
    PyObject *result = PyObject_CallObject(callee, 0);
    if (result) Py_DecRef(result);
    PyGILState_Release(state);
}

static void *foreign(void *callee)
{
    for (;;) {
        call_python(callee);
        without_gil(20000);
    }
}

int start(PyObject *callee)
{
    pthread_t thread;
    Py_IncRef(callee);
    return pthread_create(&thread, 0, foreign, callee);
}

/* Called without the GIL: takes it and calls Python, which does the same again. */
__attribute__((noinline)) void call_python_again(PyObject *callee, long depth)
{
    without_gil(200);
    int state = PyGILState_Ensure();
    PyObject *result = PyObject_CallFunction(callee, "l", depth);
    if (result) Py_DecRef(result);
    PyGILState_Release(state);
    without_gil(200);
}
