/* Functions that only a symbol table names: the test strips it. */
static volatile unsigned long sink;

__attribute__((noinline)) static void hidden_inner(unsigned long turns) {
    for (unsigned long turn = 0; turn < turns; turn++) sink += turn;
}

__attribute__((noinline)) static void hidden_outer(unsigned long turns) {
    hidden_inner(turns);
    sink++;
}

void known(unsigned long turns) {
    hidden_outer(turns);
    sink++;
}
