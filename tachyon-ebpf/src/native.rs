//! The native stack of a sample: tables behind the common walk, and where its addresses go.

use crate::maps::{RANGES, ROWS, SCRATCH_BYTES, SPACES, SampleScratch, State};
use crate::memory::{CurrentProcess, masked};
use tachyon_common::event::{RawFrame, SampleRecord, status};
use tachyon_common::stop::StopReason;
use tachyon_common::unwind::{AddressSink, NativeWalk, Range, Row, Tables};

/// The tables in their maps.
struct MapTables;

impl Tables for MapTables {
    #[inline(always)]
    fn range(&self, index: u32) -> Option<Range> {
        RANGES.get(index).copied()
    }

    #[inline(always)]
    fn row(&self, index: u32) -> Option<Row> {
        ROWS.get(index).map(|row| Row(*row))
    }
}

/// Puts addresses behind the Python frames of a sample.
struct SampleAddresses {
    sample: *mut u8,
    at: u32,
}

impl AddressSink for SampleAddresses {
    #[inline(always)]
    fn store(&mut self, index: usize, address: u64) {
        let at = masked::<{ SCRATCH_BYTES as u32 - 8 }>(self.at as usize + index * 8);
        // SAFETY: masked to a word of the scratch value, which is `SCRATCH_BYTES` long.
        unsafe { self.sample.add(at).cast::<u64>().write(address) };
    }
}

/// Walks a part of the native stack. `None`: call again.
#[inline(always)]
pub fn step(sample: &mut SampleScratch, state: &mut State) -> Option<StopReason> {
    let record = &mut sample.record;
    if state.native_at == 0 {
        let frames = masked::<0x7ff>(state.walk.stored as usize);
        state.native_at = (size_of::<SampleRecord>() + frames * size_of::<RawFrame>()) as u32;
        if record.user_sp == 0 {
            return Some(StopReason::NoRegisters);
        }
        // SAFETY: a live map value, copied; one that is replaced meanwhile belongs to another image.
        match unsafe { SPACES.get(&record.tgid) } {
            Some(space) if space.image == record.image => state.space = *space,
            _ => return Some(StopReason::NoUnwindTables),
        }
        state.native = NativeWalk::start(record.user_ip, record.user_sp, record.user_fp);
    }
    let mut addresses = SampleAddresses { sample: (&raw mut *sample).cast(), at: state.native_at };
    let ended = state.native.step(&CurrentProcess, &MapTables, state.space, &mut addresses);
    let record = &mut sample.record;
    record.native_frames = state.native.stored as u16;
    if state.native.by_frame_pointer > 0 {
        record.status |= status::BY_FRAME_POINTER;
    }
    ended
}
