//! Values of which the compiler must not know anything, for the sake of the kernel's verifier.
//!
//! `core::hint::black_box` goes through memory, which costs a BPF program five instructions; these cost none.

/// The same word. What is computed from it stays arithmetic: the compiler would make branches of masks, and the verifier would
/// follow each.
#[inline(always)]
#[must_use]
#[cfg_attr(not(target_arch = "bpf"), allow(unused_mut, reason = "the host has no use for it"))]
pub fn word(mut word: u64) -> u64 {
    #[cfg(target_arch = "bpf")]
    // SAFETY: no instruction at all.
    unsafe {
        core::arch::asm!("/* {0} */", inout(reg) word, options(pure, nomem, nostack));
    }
    word
}

/// The smaller of two numbers below 2^63: without a branch, so that the verifier does not tell the one from the other.
#[inline(always)]
#[must_use]
pub fn min(value: u64, limit: u64) -> u64 {
    let over = value.wrapping_sub(limit);
    limit.wrapping_add(over & word((over.cast_signed() >> 63).cast_unsigned()))
}

/// 1 where two words differ, else 0: to be multiplied with. (Hidden twice: the compiler knows what the sign of such a word means, and
/// what the shifted one is.)
#[inline(always)]
#[must_use]
pub fn differ(a: u64, b: u64) -> u64 {
    let difference = a ^ b;
    word(word(difference | difference.wrapping_neg()) >> 63)
}

/// The same place. What it held is read anew, and what was put there has been written: to the verifier, which does not follow what
/// lies in maps, all paths that come here are alike.
#[inline(always)]
pub fn place<T>(place: &mut T) -> &mut T {
    #[cfg(target_arch = "bpf")]
    {
        let mut pointer = core::ptr::from_mut(place);
        // SAFETY: no instruction at all; memory may have been changed, but by nobody.
        unsafe {
            core::arch::asm!("/* {0} */", inout(reg) pointer, options(nostack));
        }
        // SAFETY: the same pointer.
        unsafe { &mut *pointer }
    }
    #[cfg(not(target_arch = "bpf"))]
    core::hint::black_box(place)
}
