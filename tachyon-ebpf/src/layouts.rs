//! Where an interpreter build keeps what a walk needs.

use crate::maps::{LAYOUTS, config};
use tachyon_common::config::flags;
use tachyon_common::layout::Layout;
use tachyon_common::opaque;

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
    // Hidden, for the compiler must not take it for its initialiser.
    let layout = core::ptr::with_exposed_provenance::<Layout>(opaque::word(
        (&raw const LAYOUT).expose_provenance() as u64
    ) as usize);
    // SAFETY: a live static of this type.
    Some(unsafe { &*layout })
}
