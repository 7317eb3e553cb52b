/* Functions that stay in one instruction until somebody moves the program on by two bytes: `jmp` to itself.

   Each has a frame of another shape, and each spins at an address of its own. */
#define _GNU_SOURCE
#include <alloca.h>
#include <signal.h>
#include <stdlib.h>

#define SPIN __asm__ volatile("0: .byte 0xeb, 0xfe" : : : "memory")
#define KEEP(what) __asm__ volatile("" : : "r"(what) : "memory")

long plain(void) { SPIN; return 1; }

long plain_too(void) { SPIN; return 1; }

__attribute__((noinline)) static long below(void) { SPIN; return 1; }

long three_deep(void) { long result = below(); KEEP(result); return result; }

long grown(long size)
{
    char *room = alloca((size & 1023) + 64);
    KEEP(room);
    SPIN;
    KEEP(room);
    return 1;
}

long aligned(void)
{
    char room[256] __attribute__((aligned(64)));
    KEEP(room);
    SPIN;
    KEEP(room);
    return 1;
}

__attribute__((noinline)) static long below_grown(void *room) { SPIN; KEEP(room); return 1; }

/* The caller's frame hangs on a register that is kept in its own frame. */
long aligned_and_grown(long size)
{
    char room[256] __attribute__((aligned(64)));
    KEEP(room);
    char *more = alloca((size & 1023) + 64);
    KEEP(more);
    long result = below_grown(more);
    KEEP(room);
    return result;
}

long large(void)
{
    char room[50000];
    KEEP(room);
    SPIN;
    KEEP(room);
    return 1;
}

__attribute__((noinline)) static int compare(const void *a, const void *b)
{
    static int spun;
    if (!spun++)
        SPIN;
    return *(const int *)a - *(const int *)b;
}

long in_qsort(void)
{
    int numbers[4] = {3, 1, 2, 0};
    qsort(numbers, 4, sizeof *numbers, compare);
    return numbers[0];
}

static void handler(int number) { SPIN; KEEP(number); }

/* The frame below the handler's is the kernel's; below that the stack was interrupted, not called. */
long in_signal_handler(void)
{
    signal(SIGUSR1, handler);
    raise(SIGUSR1);
    signal(SIGUSR1, SIG_DFL);
    return 1;
}

/* Written by hand, with rules as OpenSSL's loops have them. */
__asm__(
    ".text\n"
    ".globl before_prologue, in_epilogue, in_register, in_memory\n"
    ".type before_prologue, @function\n"
    "before_prologue:\n"
    ".cfi_startproc\n"
    ".byte 0xeb, 0xfe\n"
    "push %rbx\n.cfi_adjust_cfa_offset 8\n.cfi_rel_offset rbx, 0\n"
    "pop %rbx\n.cfi_adjust_cfa_offset -8\n.cfi_restore rbx\n"
    "ret\n"
    ".cfi_endproc\n"
    ".size before_prologue, . - before_prologue\n"
    ".type in_epilogue, @function\n"
    "in_epilogue:\n"
    ".cfi_startproc\n"
    "push %rbp\n.cfi_adjust_cfa_offset 8\n.cfi_rel_offset rbp, 0\n"
    "push %rbx\n.cfi_adjust_cfa_offset 8\n.cfi_rel_offset rbx, 0\n"
    "xor %ebp, %ebp\n"
    "pop %rbx\n.cfi_adjust_cfa_offset -8\n.cfi_restore rbx\n"
    "pop %rbp\n.cfi_adjust_cfa_offset -8\n"
    ".byte 0xeb, 0xfe\n"
    "ret\n"
    ".cfi_endproc\n"
    ".size in_epilogue, . - in_epilogue\n"
    ".type in_register, @function\n"
    "in_register:\n"
    ".cfi_startproc\n"
    "mov %rsp, %r11\n.cfi_def_cfa_register r11\n"
    "push %rbp\n.cfi_offset rbp, -16\n"
    "sub $512, %rsp\n"
    "and $-64, %rsp\n"
    "xor %ebp, %ebp\n"
    ".byte 0xeb, 0xfe\n"
    "mov -8(%r11), %rbp\n.cfi_restore rbp\n"
    "mov %r11, %rsp\n.cfi_def_cfa_register rsp\n"
    "ret\n"
    ".cfi_endproc\n"
    ".size in_register, . - in_register\n"
    ".type in_memory, @function\n"
    "in_memory:\n"
    ".cfi_startproc\n"
    "mov %rsp, %rax\n.cfi_def_cfa_register rax\n"
    "push %rbp\n.cfi_offset rbp, -16\n"
    "sub $512, %rsp\n"
    "and $-64, %rsp\n"
    "mov %rax, 152(%rsp)\n"
    /* DW_CFA_def_cfa_expression: DW_OP_breg7 152, DW_OP_deref, DW_OP_plus_uconst 8. */
    ".cfi_escape 0x0f, 6, 0x77, 0x98, 0x01, 0x06, 0x23, 0x08\n"
    "xor %eax, %eax\n"
    "xor %ebp, %ebp\n"
    ".byte 0xeb, 0xfe\n"
    "mov 152(%rsp), %rax\n.cfi_def_cfa rax, 8\n"
    "mov -8(%rax), %rbp\n.cfi_restore rbp\n"
    "mov %rax, %rsp\n.cfi_def_cfa_register rsp\n"
    "ret\n"
    ".cfi_endproc\n"
    ".size in_memory, . - in_memory\n");
