//! Kernel addresses of samples to frames of the profile.

use crate::events::Frames;
use crate::profile::{FrameId, Profile};
use crate::symbolize::KernelSymbols;
use std::collections::HashMap;

/// Names the kernel's frames.
pub(in crate::recording) struct KernelFrames {
    symbols: KernelSymbols,
    known: HashMap<u64, FrameId>,
    ids: Vec<FrameId>,
}

impl KernelFrames {
    /// Knows these functions.
    pub fn new(symbols: KernelSymbols) -> Self {
        Self { symbols, known: HashMap::new(), ids: Vec::new() }
    }

    /// A profile begins that has no frames yet.
    pub fn begin_profile(&mut self) {
        self.known.clear();
    }

    /// The kernel's frames of a sample, leaf first.
    pub fn of(&mut self, profile: &mut Profile, frames: Frames<'_>) -> &[FrameId] {
        self.ids.clear();
        for (at, address) in frames.kernel().enumerate() {
            // A caller's address is where it goes on; the call may be its last instruction.
            let address = if at == 0 { address } else { address.wrapping_sub(1) };
            let symbols = &self.symbols;
            let id = *self.known.entry(address).or_insert_with(|| match symbols.name(address) {
                Some(name) => profile.special_frame(&format!("[k] {name}")),
                // One frame for all: without names an address tells nobody anything.
                None => profile.special_frame("[k] <unknown>"),
            });
            self.ids.push(id);
        }
        &self.ids
    }
}
