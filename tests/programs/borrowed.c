/* A thread that runs Python with a thread state that another thread has made. Loaded with ctypes.PyDLL. */
#include <pthread.h>
#include <stdlib.h>

typedef struct object PyObject;
extern void *PyInterpreterState_Main(void);
extern void *PyThreadState_New(void *);
extern void PyEval_RestoreThread(void *);
extern PyObject *PyObject_CallObject(PyObject *, PyObject *);
extern void Py_IncRef(PyObject *);

struct run { PyObject *callee; void *state; };

static void *run(void *argument)
{
    struct run *run = argument;
    PyEval_RestoreThread(run->state);
    PyObject_CallObject(run->callee, NULL);
    abort();
}

/* Makes a thread state here and runs `callee`, which must not return, with it in a new thread. */
int start(PyObject *callee)
{
    struct run *made = malloc(sizeof *made);
    pthread_t thread;
    Py_IncRef(callee);
    made->callee = callee;
    made->state = PyThreadState_New(PyInterpreterState_Main());
    return pthread_create(&thread, NULL, run, made);
}
