//! Where an interpreter build keeps what a walk needs.

use crate::maps::{LAYOUTS, config};
use tachyon_common::config::flags;
use tachyon_common::layout::Layout;

/// Read-only once loaded: the only layout that the programs are made for ([`flags::ONE_LAYOUT`]), written by the loader.
#[unsafe(no_mangle)]
static LAYOUT: Layout = {
    // SAFETY: it consists of numbers.
    unsafe { core::mem::zeroed() }
};

/// A layout by its number. Where the programs are made for one, that one: the verifier knows what is in it, and does not follow what
/// other versions need.
#[inline(always)]
pub fn layout_of(number: u32) -> Option<&'static Layout> {
    if config!(flags) & flags::ONE_LAYOUT == 0 {
        return LAYOUTS.get(number);
    }
    let mut layout = &raw const LAYOUT;
    // SAFETY: no instruction at all: the compiler must not take it for its initialiser.
    unsafe {
        core::arch::asm!("/* {0} */", inout(reg) layout, options(pure, nomem, nostack));
    }
    // SAFETY: a live static of this type.
    Some(unsafe { &*layout })
}
