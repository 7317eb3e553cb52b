/* Works for a while, three functions deep, none of which keeps a frame pointer. */

static volatile long sink;

__attribute__((noinline)) static long innermost(long turns)
{
    for (long turn = 0; turn < turns; turn++)
        sink = turn;
    return sink;
}

__attribute__((noinline)) static long middle(long turns)
{
    volatile long much[200];
    much[turns % 200] = turns;
    return innermost(turns) + much[turns % 200];
}

long outer(long turns)
{
    volatile long some[5];
    some[turns % 5] = turns;
    return middle(turns) + some[turns % 5];
}
