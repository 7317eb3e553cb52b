/* A program that is no Python and maps a library each millisecond, beside so many mappings of its own.
 * Arguments: path of a library, number of mappings. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    int file = open(argv[1], O_RDONLY);
    if (file < 0) return 1;
    alarm(120);
    /* Every other page has another protection: the kernel joins none of them. */
    for (long index = 0; index < atol(argv[2]); index++) {
        int protection = index % 2 ? PROT_READ : PROT_READ | PROT_EXEC;
        if (mmap(NULL, 4096, protection, MAP_PRIVATE, file, 0) == MAP_FAILED) break;
    }
    puts("{}");
    fflush(stdout);
    struct timespec pause = {0, 1000000};
    for (;;) {
        void *mapped = mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_PRIVATE, file, 0);
        nanosleep(&pause, NULL);
        munmap(mapped, 4096);
    }
}
