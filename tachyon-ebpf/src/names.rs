//! Code objects seen for the first time: their names and line tables, copied before anything can go away.

use crate::layouts::layout_of;
use crate::maps::{CODE, CodeScratch, KNOWN, SAMPLES, SENT, SHARES, State, config};
use crate::memory::{CurrentProcess, masked};
use crate::sample::Scratch;
use aya_ebpf::helpers::generated::{bpf_get_current_uid_gid, bpf_probe_read_user, bpf_ringbuf_output};
use tachyon_common::budget::{OF_PROCESS, OF_USER, Share, process_slot, second_of, user_slot};
use tachyon_common::codes::{self, CodeTables, Codes, KnownCode, SENT_ALL, SentSlot, progress, sent_key};
use tachyon_common::event::{CodeRecord, RawFrame, RecordHeader, SampleRecord, code, kind};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{
    KNOWN_SLOTS, LINETABLE_CHUNK, MAX_LINETABLE_BYTES, MAX_TEXT_BYTES, SENT_SLOTS, SENT_WAYS,
};
use tachyon_common::opaque;
use tachyon_common::walk::{self, CodeIdentity, lacks};

/// The maps `KNOWN` and `SENT`.
struct Maps;

impl CodeTables for Maps {
    type Bucket = *mut SentSlot;

    #[inline(always)]
    fn known(&self, slot: u32) -> Option<KnownCode> {
        let slot = KNOWN.get_ptr(slot & (KNOWN_SLOTS - 1))?;
        // SAFETY: a pointer into a map value, checked by the lookup; what racing writers tear has a wrong check.
        Some(unsafe { core::ptr::read_volatile(slot) })
    }

    #[inline(always)]
    fn set_known(&self, slot: u32, entry: &KnownCode) {
        let Some(slot) = KNOWN.get_ptr_mut(slot & (KNOWN_SLOTS - 1)) else { return };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(slot, *entry) };
    }

    #[inline(always)]
    fn bucket(&self, index: u32) -> Option<*mut SentSlot> {
        Some(SENT.get_ptr_mut(index & (SENT_SLOTS / SENT_WAYS - 1))?.cast())
    }

    #[inline(always)]
    fn sent(&self, bucket: *mut SentSlot, way: u32) -> SentSlot {
        let slot = slot(bucket, way);
        // SAFETY: a word of a map value.
        let key = unsafe { &raw const (*slot).key };
        // SAFETY: as above.
        let key = unsafe { core::ptr::read_volatile(key) };
        // SAFETY: as above.
        let progress = unsafe { &raw const (*slot).progress };
        // SAFETY: as above.
        let progress = unsafe { core::ptr::read_volatile(progress) };
        SentSlot { key, progress, _pad: 0 }
    }

    #[inline(always)]
    fn set_sent(&self, bucket: *mut SentSlot, way: u32, new: SentSlot) {
        let slot = slot(bucket, way);
        // SAFETY: a word of a map value.
        let progress = unsafe { &raw mut (*slot).progress };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(progress, new.progress) };
        // SAFETY: as above.
        let key = unsafe { &raw mut (*slot).key };
        // SAFETY: as above.
        unsafe { core::ptr::write_volatile(key, new.key) };
    }
}

#[inline(always)]
fn slot(bucket: *mut SentSlot, way: u32) -> *mut SentSlot {
    // SAFETY: masked to a slot of the bucket that the lookup returned.
    unsafe { bucket.add(masked::<{ SENT_WAYS - 1 }>(way as usize)) }
}

/// [`Codes::look_up`].
#[inline(always)]
pub fn look_up(codes: &mut Codes, code: u64, identity: &mut CodeIdentity) -> u64 {
    codes.look_up(&CurrentProcess, &Maps, code, identity)
}

/// [`Codes::note`] of this CPU's scratch. A global function, as [`crate::sample::walk_python_frames`] is: its four places to look are
/// not multiplied with what follows. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn note_code(index: u32, code: u64) -> u64 {
    let Some(state) = Scratch::state() else { return 0 };
    state.codes.note(&Maps, state.process.image, index as usize, code, &state.walk.identity);
    0
}

/// [`codes::set_progress`]. A global function, as [`crate::sample::walk_python_frames`] is: its loop would be verified for each way that a
/// record can be made. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn set_progress(key: u64, progress: u32) -> u64 {
    codes::set_progress(&Maps, key, progress);
    0
}

/// Copies `len` bytes of the target to `payload + at`; false when they cannot be read. `at` below 8 KiB, `len` at
/// most 8 KiB: both masked here, so that the verifier sees at + len < 24 KiB.
#[inline(always)]
fn copy(payload: *mut u8, at: usize, addr: u64, len: usize) -> bool {
    // SAFETY: masked to the payload's first 8 KiB, see above.
    let into = unsafe { payload.add(masked::<0x1fff>(at)) };
    let len = masked::<0x3fff>(len) as u32;
    // SAFETY: `into` has room for 16 KiB more; the helper checks `addr`.
    unsafe { bpf_probe_read_user(into.cast(), len, addr as *const _) == 0 }
}

/// This CPU's code record.
#[inline(always)]
fn code_scratch() -> Option<&'static mut CodeScratch> {
    let scratch = CODE.get_ptr_mut(0)?;
    // SAFETY: the scratch value is this CPU's own, and only the timer's programs, which do not nest, use it.
    Some(unsafe { &mut *scratch })
}

/// Copies the name of the code object that the walk read last, unless it `lacks` that, to the payload. A global function, as
/// [`crate::sample::walk_python_frames`] is: what one part of a record can be is not multiplied with what the next can. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn copy_qualname(lacking: u32) -> u64 {
    let (Some(state), Some(scratch)) = (Scratch::state(), code_scratch()) else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let (record, payload) = (&mut scratch.record, scratch.payload.as_mut_ptr());
    match walk::text(&CurrentProcess, layout, state.walk.identity.qualname, MAX_TEXT_BYTES as u32) {
        Some(found) if lacking & lacks::QUALNAME == 0 && copy(payload, 0, found.addr, found.bytes as usize) => {
            (record.qualname_bytes, record.qualname_kind) = (found.bytes, found.kind);
            if found.cut {
                record.flags |= code::QUALNAME_CUT;
            }
        }
        _ => record.flags |= code::QUALNAME_UNREADABLE,
    }
    0
}

/// Copies the name of its file behind it, likewise.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn copy_filename(lacking: u32) -> u64 {
    let (Some(state), Some(scratch)) = (Scratch::state(), code_scratch()) else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let (record, payload) = (&mut scratch.record, scratch.payload.as_mut_ptr());
    let at = record.qualname_bytes as usize;
    match walk::text(&CurrentProcess, layout, state.walk.identity.filename, MAX_TEXT_BYTES as u32) {
        Some(found) if lacking & lacks::FILENAME == 0 && copy(payload, at, found.addr, found.bytes as usize) => {
            (record.filename_bytes, record.filename_kind) = (found.bytes, found.kind);
            if found.cut {
                record.flags |= code::FILENAME_CUT;
            }
        }
        _ => record.flags |= code::FILENAME_UNREADABLE,
    }
    0
}

/// Copies the next part of its line table behind both, likewise. Always 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn copy_linetable(lacking: u32) -> u64 {
    let (Some(state), Some(scratch)) = (Scratch::state(), code_scratch()) else { return 0 };
    let Some(layout) = layout_of(state.process.layout) else { return 0 };
    let (record, payload) = (&mut scratch.record, scratch.payload.as_mut_ptr());
    let linetable = state.walk.identity.linetable;
    let mut total = walk::linetable_len(&CurrentProcess, layout, linetable);
    if total > u64::from(MAX_LINETABLE_BYTES) {
        total = u64::from(MAX_LINETABLE_BYTES);
        record.flags |= code::LINETABLE_CUT;
    }
    record.linetable_len = total as u32;
    let start = record.linetable_start;
    if lacking & lacks::LINETABLE != 0 || u64::from(start) > total {
        record.flags |= code::LINETABLE_UNREADABLE;
        return 0;
    }
    let left = total as u32 - start;
    let part = if left as usize > LINETABLE_CHUNK { LINETABLE_CHUNK as u32 } else { left };
    let from = linetable.wrapping_add(u64::from(layout.bytes_sval)).wrapping_add(u64::from(start));
    let at = (record.qualname_bytes + record.filename_bytes) as usize;
    if copy(payload, at, from, part as usize) {
        record.linetable_bytes = part;
    } else {
        record.flags |= code::LINETABLE_UNREADABLE;
    }
    0
}

/// What became of one code object.
pub enum Named {
    /// There was nothing to send.
    Nothing,
    /// A record was sent, and nothing is left.
    Done,
    /// A part was sent; more is to come.
    Partly,
    /// The ring is full: try with another sample.
    RingFull,
    /// The process, or its user, has had its share of this second: likewise.
    PutOff,
}

/// Sends the next record of the code object of `frame`, which `sample` has read and which lacks what the bits of
/// [`lacks`] say: the frame holds it, so it is the same one.
#[inline(always)]
pub fn send(state: &mut State, layout: &Layout, sample: &SampleRecord, frame: &RawFrame, lacking: u32) -> Named {
    let key = sent_key(state.process.image, frame.code, frame.fingerprint);
    let start = progress(&Maps, key);
    if start == SENT_ALL {
        return Named::Nothing;
    }
    // SAFETY: the helper takes nothing and cannot fail.
    let uid = unsafe { bpf_get_current_uid_gid() } as u32;
    let second = second_of(sample.ktime_ns);
    let (Some(process), Some(user)) =
        (share(process_slot(config!(seed), sample.tgid)), share(user_slot(config!(seed), uid)))
    else {
        return Named::Nothing;
    };
    // SAFETY: pointers into map values, checked by the lookup; what racing writers lose is some records' worth.
    let of_process = unsafe { core::ptr::read_volatile(process) }.of(sample.tgid, second);
    // SAFETY: as above.
    let of_user = unsafe { core::ptr::read_volatile(user) }.of(uid, second);
    if !of_process.has_room(OF_PROCESS) || !of_user.has_room(OF_USER) {
        return Named::PutOff;
    }
    let Some(scratch) = code_scratch() else { return Named::Nothing };
    // The sample has been walked: what the walk held of its last frame is not needed any more.
    let identity = &mut state.walk.identity;
    if !identity.read_head(&CurrentProcess, layout, frame.code, &mut state.code_buffer) {
        return Named::Nothing;
    }
    scratch.record = CodeRecord {
        header: RecordHeader { kind: kind::CODE, bank: sample.header.bank, event: 0, len: 0 },
        image: state.process.image,
        code: frame.code,
        fingerprint: frame.fingerprint,
        qualname: identity.qualname,
        filename: identity.filename,
        linetable: identity.linetable,
        tgid: sample.tgid,
        firstlineno: identity.firstlineno,
        layout: state.process.layout,
        flags: 0,
        linetable_len: 0,
        linetable_start: start,
        qualname_bytes: 0,
        filename_bytes: 0,
        linetable_bytes: 0,
        qualname_kind: 1,
        filename_kind: 1,
        _pad: [0; 2],
    };
    let record = opaque::place(&mut scratch.record);
    if start == 0 {
        copy_qualname(lacking);
        copy_filename(lacking);
    }
    copy_linetable(lacking);
    // What the three have written.
    let record = opaque::place(record);
    let payload_bytes = record.qualname_bytes + record.filename_bytes + record.linetable_bytes;
    let bytes = (size_of::<CodeRecord>() + payload_bytes as usize + 7) & !7;
    record.header.len = bytes as u32;
    let reached = start + record.linetable_bytes;
    let done = record.flags & code::LINETABLE_UNREADABLE != 0 || reached >= record.linetable_len;
    // SAFETY: the scratch value is 32 KiB long and the length is masked below that.
    let sent = unsafe {
        bpf_ringbuf_output(
            (&raw const SAMPLES).cast_mut().cast(),
            (&raw mut *scratch).cast(),
            masked::<0x7fff>(bytes) as u64,
            NO_WAKEUP,
        )
    };
    if sent != 0 {
        return Named::RingFull;
    }
    // SAFETY: as above.
    unsafe { core::ptr::write_volatile(process, of_process.with(bytes as u32)) };
    // SAFETY: as above.
    unsafe { core::ptr::write_volatile(user, of_user.with(bytes as u32)) };
    let _zero = set_progress(key, if done { SENT_ALL } else { reached });
    if done { Named::Done } else { Named::Partly }
}

#[inline(always)]
fn share(slot: u32) -> Option<*mut Share> {
    SHARES.get_ptr_mut(slot)
}

/// `BPF_RB_NO_WAKEUP`: the sample that follows decides.
const NO_WAKEUP: u64 = 1;
