/* Can a thread's stack be read when its wait is over, before it runs code of its own? That is what waiting threads are
 * sampled by (`--wall`), and nothing promises it: so each kernel is asked.
 *
 * When a child of this program is switched in, a BPF program on `sched_switch`, where the task before it is still the current
 * one, writes to a ring buffer with BPF_RB_FORCE_WAKEUP. That raises an interrupt on this very CPU, and a BPF program on
 * its tracepoint looks whose thread it has met and whether that has run since it was switched out: each child counts all the
 * time, or after each wait. Every CPU has a ring of its own, for two CPUs cannot have one ring's wake-up in flight at once.
 *
 * Prints lines of `NAME NUMBER`, which `xtask/src/vm/kick.rs` judges. The instructions are put together by hand: this needs
 * neither the object nor the loader that it is the ground for, nor a BPF compiler. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/bpf.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Where the interrupt of an `irq_work` can be met. */
#ifdef __aarch64__
#define INTERRUPT "ipi_entry"
#else
#define INTERRUPT "irq_work_entry"
#endif

#define CHILDREN 4
#define MAX_CPUS 256
/* Enough of them, or enough seconds. */
#define ENOUGH 2000
#define MOST_SECONDS 8

enum count { SWITCHED_IN, KICKED, IN_THREAD, ELSEWHERE, UNREADABLE, TOO_LATE, NOT_MET, RING_FULL, LATENCY_NS, LATENCY_MAX_NS, COUNTS };
static const char *const NAMES[COUNTS] = {
    "switched_in", "kicked", "in_thread", "elsewhere", "unreadable", "too_late", "not_met", "ring_full", "latency_sum_ns", "latency_max_ns",
};

/* What has happened to a child, as the child itself sees it: at one address in all of them. */
static volatile uint64_t turns;

static void die(const char *what) {
    printf("refused %s: %s\n", what, strerror(errno));
    exit(1);
}

static long bpf(int command, union bpf_attr *attr) {
    return syscall(__NR_bpf, command, attr, sizeof *attr);
}

static int map(enum bpf_map_type type, uint32_t key, uint32_t value, uint32_t entries, int inner) {
    union bpf_attr attr = {.map_type = type, .key_size = key, .value_size = value, .max_entries = entries};
    attr.inner_map_fd = (uint32_t)inner;
    int fd = (int)bpf(BPF_MAP_CREATE, &attr);
    if (fd < 0)
        die("BPF_MAP_CREATE");
    return fd;
}

/* A program while it is written. Jumps that are `ends` go to its last two instructions. */
struct program {
    struct bpf_insn code[256];
    int length;
    int ends[32];
    int end_count;
};

static int put(struct program *p, uint8_t code, uint8_t dst, uint8_t src, int16_t off, int32_t imm) {
    p->code[p->length] = (struct bpf_insn){.code = code, .dst_reg = dst, .src_reg = src, .off = off, .imm = imm};
    return p->length++;
}

static void set(struct program *p, uint8_t reg, int32_t value) { put(p, BPF_ALU64 | BPF_MOV | BPF_K, reg, 0, 0, value); }
static void move(struct program *p, uint8_t reg, uint8_t from) { put(p, BPF_ALU64 | BPF_MOV | BPF_X, reg, from, 0, 0); }
static void load(struct program *p, uint8_t reg, uint8_t from, int16_t at) { put(p, BPF_LDX | BPF_MEM | BPF_DW, reg, from, at, 0); }
static void store(struct program *p, uint8_t to, int16_t at, uint8_t reg) { put(p, BPF_STX | BPF_MEM | BPF_DW, to, reg, at, 0); }
static void call(struct program *p, int32_t helper) { put(p, BPF_JMP | BPF_CALL, 0, 0, 0, helper); }
/* A jump whose way is not known yet. */
static int when(struct program *p, uint8_t op, uint8_t reg, int32_t value) { return put(p, BPF_JMP | op | BPF_K, reg, 0, 0, value); }
static void here(struct program *p, int jump) { p->code[jump].off = (int16_t)(p->length - jump - 1); }
static void end_when(struct program *p, uint8_t op, uint8_t reg, int32_t value) { p->ends[p->end_count++] = when(p, op, reg, value); }
static void end(struct program *p) { end_when(p, BPF_JA, 0, 0); }

static void wide(struct program *p, uint8_t reg, uint8_t src, uint64_t value) {
    put(p, BPF_LD | BPF_DW | BPF_IMM, reg, src, 0, (int32_t)(uint32_t)value);
    put(p, 0, 0, 0, 0, (int32_t)(uint32_t)(value >> 32));
}

/* The address of something on the stack. */
static void stack(struct program *p, uint8_t reg, int32_t at) {
    move(p, reg, BPF_REG_10);
    put(p, BPF_ALU64 | BPF_ADD | BPF_K, reg, 0, 0, at);
}

#define KEY (-8)
#define VALUE (-16)
#define INDEX (-24)

/* r0: the value under a key that lies on the stack. */
static void look_up(struct program *p, int fd, int32_t key) {
    wide(p, BPF_REG_1, BPF_PSEUDO_MAP_FD, (uint64_t)fd);
    stack(p, BPF_REG_2, key);
    call(p, BPF_FUNC_map_lookup_elem);
}

/* r0: the value of an index; the program ends where there is none. */
static void look_up_index(struct program *p, int fd, int32_t index) {
    put(p, BPF_ST | BPF_MEM | BPF_W, BPF_REG_10, 0, INDEX, index);
    look_up(p, fd, INDEX);
    end_when(p, BPF_JEQ, BPF_REG_0, 0);
}

static int counts, tasks, pending, kicks;

static void add(struct program *p, enum count which, uint8_t reg) {
    look_up_index(p, counts, (int32_t)which);
    put(p, BPF_STX | BPF_XADD | BPF_DW, BPF_REG_0, reg, 0, 0);
}

static void count(struct program *p, enum count which) {
    look_up_index(p, counts, (int32_t)which);
    set(p, BPF_REG_1, 1);
    put(p, BPF_STX | BPF_XADD | BPF_DW, BPF_REG_0, BPF_REG_1, 0, 0);
}

/* r0: whether the current thread's `turns` could not be read into VALUE. */
static void read_turns(struct program *p) {
    stack(p, BPF_REG_1, VALUE);
    set(p, BPF_REG_2, 8);
    wide(p, BPF_REG_3, 0, (uint64_t)(uintptr_t)&turns);
    call(p, BPF_FUNC_probe_read_user);
}

static int loaded(struct program *p, const char *name) {
    static char log[1 << 16];
    for (int i = 0; i < p->end_count; i++)
        here(p, p->ends[i]);
    set(p, BPF_REG_0, 0);
    put(p, BPF_JMP | BPF_EXIT, 0, 0, 0, 0);
    union bpf_attr attr = {.prog_type = BPF_PROG_TYPE_RAW_TRACEPOINT, .insn_cnt = (uint32_t)p->length, .log_level = 1};
    attr.insns = (uintptr_t)p->code;
    attr.license = (uintptr_t) "GPL";
    attr.log_buf = (uintptr_t)log;
    attr.log_size = sizeof log;
    strcpy(attr.prog_name, name);
    int fd = (int)bpf(BPF_PROG_LOAD, &attr);
    if (fd < 0) {
        fprintf(stderr, "%s", log);
        die(name);
    }
    return fd;
}

static int attached(int program, const char *tracepoint) {
    union bpf_attr attr = {.raw_tracepoint = {.name = (uintptr_t)tracepoint, .prog_fd = (uint32_t)program}};
    int fd = (int)bpf(BPF_RAW_TRACEPOINT_OPEN, &attr);
    if (fd < 0)
        die(tracepoint);
    return fd;
}

/* `sched_switch(preempt, prev, next, ...)`. */
static int on_switch(const pid_t *children) {
    static struct program p;
    move(&p, BPF_REG_9, BPF_REG_1);
    call(&p, BPF_FUNC_get_current_pid_tgid);
    put(&p, BPF_ALU64 | BPF_RSH | BPF_K, BPF_REG_0, 0, 0, 32);
    int known[CHILDREN];
    for (int i = 0; i < CHILDREN; i++)
        known[i] = when(&p, BPF_JEQ, BPF_REG_0, children[i]);
    int other = when(&p, BPF_JA, 0, 0);
    for (int i = 0; i < CHILDREN; i++)
        here(&p, known[i]);
    read_turns(&p);
    int unreadable = when(&p, BPF_JNE, BPF_REG_0, 0);
    load(&p, BPF_REG_7, BPF_REG_9, 8);
    store(&p, BPF_REG_10, KEY, BPF_REG_7);
    look_up(&p, tasks, KEY);
    int first = when(&p, BPF_JEQ, BPF_REG_0, 0);
    load(&p, BPF_REG_1, BPF_REG_10, VALUE);
    store(&p, BPF_REG_0, 0, BPF_REG_1);
    int done = when(&p, BPF_JA, 0, 0);
    here(&p, first);
    wide(&p, BPF_REG_1, BPF_PSEUDO_MAP_FD, (uint64_t)tasks);
    stack(&p, BPF_REG_2, KEY);
    stack(&p, BPF_REG_3, VALUE);
    set(&p, BPF_REG_4, BPF_ANY);
    call(&p, BPF_FUNC_map_update_elem);
    here(&p, done);
    here(&p, unreadable);
    here(&p, other);

    load(&p, BPF_REG_7, BPF_REG_9, 16);
    store(&p, BPF_REG_10, KEY, BPF_REG_7);
    look_up(&p, tasks, KEY);
    end_when(&p, BPF_JEQ, BPF_REG_0, 0);
    load(&p, BPF_REG_8, BPF_REG_0, 0);
    count(&p, SWITCHED_IN);
    call(&p, BPF_FUNC_get_smp_processor_id);
    put(&p, BPF_STX | BPF_MEM | BPF_W, BPF_REG_10, BPF_REG_0, INDEX, 0);
    look_up(&p, kicks, INDEX);
    end_when(&p, BPF_JEQ, BPF_REG_0, 0);
    move(&p, BPF_REG_6, BPF_REG_0);
    look_up_index(&p, pending, 0);
    move(&p, BPF_REG_9, BPF_REG_0);
    load(&p, BPF_REG_1, BPF_REG_9, 0);
    int none = when(&p, BPF_JEQ, BPF_REG_1, 0);
    count(&p, NOT_MET);
    here(&p, none);
    store(&p, BPF_REG_9, 8, BPF_REG_7);
    store(&p, BPF_REG_9, 16, BPF_REG_8);
    call(&p, BPF_FUNC_ktime_get_ns);
    store(&p, BPF_REG_9, 0, BPF_REG_0);
    move(&p, BPF_REG_1, BPF_REG_6);
    stack(&p, BPF_REG_2, KEY);
    set(&p, BPF_REG_3, 8);
    set(&p, BPF_REG_4, BPF_RB_FORCE_WAKEUP);
    call(&p, BPF_FUNC_ringbuf_output);
    int full = when(&p, BPF_JNE, BPF_REG_0, 0);
    count(&p, KICKED);
    end(&p);
    here(&p, full);
    put(&p, BPF_ST | BPF_MEM | BPF_DW, BPF_REG_9, 0, 0, 0);
    count(&p, RING_FULL);
    return loaded(&p, "on_switch");
}

static int on_interrupt(void) {
    static struct program p;
    look_up_index(&p, pending, 0);
    load(&p, BPF_REG_7, BPF_REG_0, 0);
    end_when(&p, BPF_JEQ, BPF_REG_7, 0);
    load(&p, BPF_REG_8, BPF_REG_0, 8);
    load(&p, BPF_REG_9, BPF_REG_0, 16);
    put(&p, BPF_ST | BPF_MEM | BPF_DW, BPF_REG_0, 0, 0, 0);
    call(&p, BPF_FUNC_ktime_get_ns);
    put(&p, BPF_ALU64 | BPF_SUB | BPF_X, BPF_REG_0, BPF_REG_7, 0, 0);
    move(&p, BPF_REG_7, BPF_REG_0);
    call(&p, BPF_FUNC_get_current_task);
    int same = put(&p, BPF_JMP | BPF_JEQ | BPF_X, BPF_REG_0, BPF_REG_8, 0, 0);
    count(&p, ELSEWHERE);
    end(&p);
    here(&p, same);
    read_turns(&p);
    int readable = when(&p, BPF_JEQ, BPF_REG_0, 0);
    count(&p, UNREADABLE);
    end(&p);
    here(&p, readable);
    load(&p, BPF_REG_1, BPF_REG_10, VALUE);
    int in_time = put(&p, BPF_JMP | BPF_JEQ | BPF_X, BPF_REG_1, BPF_REG_9, 0, 0);
    count(&p, TOO_LATE);
    end(&p);
    here(&p, in_time);
    count(&p, IN_THREAD);
    add(&p, LATENCY_NS, BPF_REG_7);
    look_up_index(&p, counts, LATENCY_MAX_NS);
    load(&p, BPF_REG_1, BPF_REG_0, 0);
    int less = put(&p, BPF_JMP | BPF_JGE | BPF_X, BPF_REG_1, BPF_REG_7, 0, 0);
    store(&p, BPF_REG_0, 0, BPF_REG_7);
    here(&p, less);
    return loaded(&p, "on_interrupt");
}

static void rest(long ns) {
    struct timespec time = {0, ns};
    nanosleep(&time, NULL);
}

/* One that sleeps, two that wake each other, one that runs all the time and is sometimes told to wait: of that one, any
 * instruction that it has run is seen. */
static void be_child(int number, int pipes[2][2]) {
    char byte = 0;
    for (;;) {
        if (number == 0)
            rest(200000);
        if (number == 1 && (write(pipes[0][1], &byte, 1) != 1 || read(pipes[1][0], &byte, 1) != 1))
            _exit(1);
        if (number == 2 && (read(pipes[0][0], &byte, 1) != 1 || write(pipes[1][1], &byte, 1) != 1))
            _exit(1);
        turns++;
    }
}

static uint64_t told(enum count which) {
    uint32_t key = which;
    uint64_t value = 0;
    union bpf_attr attr = {.map_fd = (uint32_t)counts};
    attr.key = (uintptr_t)&key;
    attr.value = (uintptr_t)&value;
    if (bpf(BPF_MAP_LOOKUP_ELEM, &attr) < 0)
        die("BPF_MAP_LOOKUP_ELEM");
    return value;
}

int main(void) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    struct rlimit all = {RLIM_INFINITY, RLIM_INFINITY};
    setrlimit(RLIMIT_MEMLOCK, &all);
    long cpus = sysconf(_SC_NPROCESSORS_CONF), page = sysconf(_SC_PAGESIZE);
    if (cpus > MAX_CPUS)
        cpus = MAX_CPUS;
    counts = map(BPF_MAP_TYPE_ARRAY, 4, 8, COUNTS, 0);
    tasks = map(BPF_MAP_TYPE_HASH, 8, 8, 4 * CHILDREN, 0);
    pending = map(BPF_MAP_TYPE_PERCPU_ARRAY, 4, 24, 1, 0);
    volatile uint64_t *consumed[MAX_CPUS];
    volatile uint64_t *produced[MAX_CPUS];
    for (uint32_t cpu = 0; cpu < cpus; cpu++) {
        int ring = map(BPF_MAP_TYPE_RINGBUF, 0, 0, 1 << 16, 0);
        consumed[cpu] = mmap(NULL, (size_t)page, PROT_READ | PROT_WRITE, MAP_SHARED, ring, 0);
        produced[cpu] = mmap(NULL, (size_t)page, PROT_READ, MAP_SHARED, ring, page);
        if (consumed[cpu] == MAP_FAILED || produced[cpu] == MAP_FAILED)
            die("mmap of a ring");
        if (cpu == 0)
            kicks = map(BPF_MAP_TYPE_ARRAY_OF_MAPS, 4, 4, (uint32_t)cpus, ring);
        union bpf_attr attr = {.map_fd = (uint32_t)kicks};
        attr.key = (uintptr_t)&cpu;
        attr.value = (uintptr_t)&ring;
        if (bpf(BPF_MAP_UPDATE_ELEM, &attr) < 0)
            die("an array of rings");
    }
    /* Its page is there before anybody reads it. */
    turns = 1;
    int pipes[2][2];
    if (pipe(pipes[0]) < 0 || pipe(pipes[1]) < 0)
        die("pipe");
    pid_t children[CHILDREN];
    for (int i = 0; i < CHILDREN; i++) {
        children[i] = fork();
        if (children[i] == 0)
            be_child(i, pipes);
        if (children[i] < 0)
            die("fork");
    }
    printf("hook %s\n", INTERRUPT);
    int interrupts = attached(on_interrupt(), INTERRUPT);
    int switches = attached(on_switch(children), "sched_switch");
    for (int i = 0; i < MOST_SECONDS * 100 && told(IN_THREAD) < ENOUGH; i++) {
        rest(10000000);
        for (int cpu = 0; cpu < cpus; cpu++)
            *consumed[cpu] = *produced[cpu];
    }
    close(switches);
    /* The last interrupts are on their way. */
    rest(100000000);
    close(interrupts);
    for (int i = 0; i < CHILDREN; i++) {
        kill(children[i], SIGKILL);
        waitpid(children[i], NULL, 0);
    }
    for (int which = 0; which < COUNTS; which++)
        printf("%s %llu\n", NAMES[which], (unsigned long long)told((enum count)which));
    return 0;
}
