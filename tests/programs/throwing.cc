// Throws and catches for ever. At each moment its functions stand in this order, from the root: as many as were called.
#include <cstddef>

namespace {
volatile int sink;

struct Guard {
    ~Guard() { sink = sink + 1; }
};
}  // namespace

extern "C" {
__attribute__((noinline)) void third(int turn) {
    auto room = static_cast<volatile char *>(__builtin_alloca(turn % 100 + 16));
    room[0] = 1;
    throw turn + room[0];
}

__attribute__((noinline)) void second(int turn) {
    Guard guard;
    third(turn);
    sink = 2;
}

__attribute__((noinline)) int first(int turn) {
    // Of a size that only shows when it runs: the frame is found by its `rbp`.
    auto room = static_cast<volatile char *>(__builtin_alloca(turn % 200 + 16));
    room[0] = 1;
    second(turn);
    return room[0];
}

__attribute__((noinline)) int catching(int turn) {
    auto room = static_cast<volatile char *>(__builtin_alloca(turn % 300 + 16));
    room[0] = 1;
    try {
        return first(turn);
    } catch (int number) {
        return number & 1;
    }
}

int throwing(double seconds, double (*now)()) {
    int caught = 0;
    for (double end = now() + seconds; now() < end;) {
        for (int turn = 0; turn < 10000; turn++) caught += catching(turn);
    }
    return caught;
}
}
