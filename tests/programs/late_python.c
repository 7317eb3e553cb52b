/* A program that embeds CPython late: it works for so many milliseconds (CPU time) without it, then loads the library
 * and runs a script.  Arguments: milliseconds, path of libpython, text of the script. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    while (clock() / (CLOCKS_PER_SEC / 1000) < atol(argv[1])) {}
    void *library = dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    void (*initialize)(void) = (void (*)(void))dlsym(library, "Py_Initialize");
    int (*run)(const char *) = (int (*)(const char *))dlsym(library, "PyRun_SimpleString");
    initialize();
    return run(argv[3]);
}
