//! One address space for the native code of all processes of a profile.
//!
//! The format has one address space. A process's mappings stay where they are; mappings of another process at the same
//! addresses are moved, one by one, to free addresses.

use super::Label;
use super::symbols::{BASE, PAGE, Place};
use crate::profile::{FrameId, MappingId, NativePlace, Profile};
use std::collections::{BTreeMap, HashMap};

/// Where mappings go if their addresses are taken.
const MOVED: u64 = 0x3000_0000_0000;
/// No program has code from here on, and the kernel's addresses are far above.
const LIMIT: u64 = 1 << 56;
/// Synthetic code may extend up to here.
const SYNTHETIC_END: u64 = MOVED;

/// A mapping, at its address in the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Object {
    pub start: u64,
    pub end: u64,
    /// Where in the file it begins.
    pub offset: u64,
    pub path: String,
    /// What is at the addresses that were sampled.
    pub code: BTreeMap<u64, Place>,
}

/// The mappings in which addresses were sampled.
#[derive(Debug, Default)]
pub(super) struct Space {
    /// In order of their addresses.
    pub objects: Vec<Object>,
    /// Addresses of frames that keep theirs.
    addresses: HashMap<FrameId, u64>,
}

impl Space {
    /// Builds it from the frames that are used. Frames inlined into another one have no address of their own, and
    /// addresses of code without an object mean nothing later.
    pub fn new(profile: &Profile, used: impl Iterator<Item = FrameId>, name: impl Fn(FrameId) -> Place) -> Self {
        let mut frames: BTreeMap<MappingId, Vec<(FrameId, u64)>> = BTreeMap::new();
        for id in used {
            if let Some(&NativePlace { mapping: Some(mapping), address, inlined: false, .. }) = profile.native_place(id)
            {
                frames.entry(mapping).or_default().push((id, address));
            }
        }
        let mut space = Self::default();
        // Ends of the ranges that are taken, by start.
        let mut taken = BTreeMap::from([(BASE, SYNTHETIC_END)]);
        let mut next = MOVED;
        for (id, mut frames) in frames {
            let mapping = profile.native.mapping(id);
            // A process may have reported nonsense about itself.
            frames.retain(|&(_, address)| mapping.start <= address && address < mapping.end);
            if frames.is_empty() || mapping.start == 0 || mapping.end > LIMIT {
                continue;
            }
            let len = mapping.end - mapping.start;
            let below = taken.range(..mapping.end).next_back();
            let start = if below.is_none_or(|(_, &end)| end <= mapping.start) {
                mapping.start
            } else {
                let fits = next.checked_add(len).filter(|&end| end <= LIMIT);
                let Some(end) = fits.filter(|&end| taken.range(next..end).next().is_none()) else { continue };
                std::mem::replace(&mut next, end.next_multiple_of(PAGE))
            };
            taken.insert(start, start + len);
            let mut code = BTreeMap::new();
            for (frame, address) in frames {
                let address = address - mapping.start + start;
                // If two functions have the same address, only one can keep it.
                if let std::collections::btree_map::Entry::Vacant(vacant) = code.entry(address) {
                    vacant.insert(name(frame));
                    space.addresses.insert(frame, address);
                }
            }
            let path = mapping.path.clone();
            space.objects.push(Object { start, end: start + len, offset: mapping.offset, path, code });
        }
        space.objects.sort_unstable_by_key(|object| object.start);
        space
    }

    /// The address that a frame has here; `None`: it gets a synthetic one.
    pub fn address(&self, frame: FrameId) -> Option<u64> {
        self.addresses.get(&frame).copied()
    }

    /// Addresses for a caller: readers subtract one, and both lead to its call. The second is as good as the first,
    /// unless another function begins there.
    pub fn callers(&self, address: u64) -> [u64; 2] {
        let after = self.objects.partition_point(|object| object.start <= address);
        let code = after.checked_sub(1).map(|index| &self.objects[index]);
        let own = code.and_then(|object| object.code.get(&address));
        let next = code.and_then(|object| object.code.get(&(address + 1)));
        let same = next.is_none_or(|next| own.is_some_and(|own| own.function == next.function));
        [address + 1, if same { address + 2 } else { address + 1 }]
    }
}

/// The place of a native frame, with its source where that is known.
pub(super) fn native_place(profile: &Profile, id: FrameId) -> Place {
    let label = Label::of(profile, profile.frames.get(id));
    let mut place = super::place(&label);
    if let Some((file, line)) = profile.native_source(id) {
        place.file = super::escape_controls(file).into_owned();
        place.line = line.unwrap_or(0);
    }
    place
}
