/* What is copied into memory of no file and called there: it has a frame of its own on the stack. */

long told_work(long rounds) {
    volatile long on_the_stack[64] = {0};
    for (long round = 0; round < rounds; round++) on_the_stack[round & 63] += round;
    return on_the_stack[7];
}
