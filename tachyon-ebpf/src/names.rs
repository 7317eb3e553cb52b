//! Code objects seen for the first time: their names and line tables, copied before anything can go away.

use crate::maps::{CODE, CodeScratch, KNOWN, SAMPLES, SENT, SHARES, State, config};
use crate::memory::{CurrentProcess, masked};
use aya_ebpf::helpers::generated::{bpf_get_current_uid_gid, bpf_probe_read_user, bpf_ringbuf_output};
use tachyon_common::budget::{OF_PROCESS, OF_USER, Share, process_slot, second_of, user_slot};
use tachyon_common::codes::{CodeTables, Codes, KnownCode, SENT_ALL, SentSlot, progress, sent_key, set_progress};
use tachyon_common::event::{CodeRecord, RawFrame, RecordHeader, SampleRecord, code, kind};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{
    KNOWN_SLOTS, LINETABLE_CHUNK, MAX_LINETABLE_BYTES, MAX_TEXT_BYTES, SENT_SLOTS, SENT_WAYS,
};
use tachyon_common::walk::{self, CodeIdentity, Text, lacks};

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

/// [`Codes::note`]. A function of its own for the verifier: its four places to look are not multiplied with what follows.
#[inline(never)]
pub fn note(codes: &mut Codes, image: u64, index: usize, code: u64, identity: &CodeIdentity) -> u64 {
    codes.note(&Maps, image, index, code, identity);
    0
}

/// Where a string's text is; `None` when the string cannot be read or is not compact.
#[inline(always)]
fn text(layout: &Layout, object: u64) -> Option<Text> {
    walk::text(&CurrentProcess, layout, object, MAX_TEXT_BYTES as u32)
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
    let Some(scratch) = CODE.get_ptr_mut(0) else { return Named::Nothing };
    let Ok(identity) = walk::code_head(&CurrentProcess, layout, frame.code, &mut state.code_buffer) else {
        return Named::Nothing;
    };
    // SAFETY: the scratch value is this CPU's own, and only the timer's programs, which do not nest, use it.
    let scratch: &mut CodeScratch = unsafe { &mut *scratch };
    let payload = scratch.payload.as_mut_ptr();
    let mut flags = 0;
    let mut qualname = Text { kind: 1, ..Text::default() };
    let mut filename = Text { kind: 1, ..Text::default() };
    if start == 0 {
        match text(layout, identity.qualname) {
            Some(found) if lacking & lacks::QUALNAME == 0 && copy(payload, 0, found.addr, found.bytes as usize) => {
                qualname = found;
            }
            _ => flags |= code::QUALNAME_UNREADABLE,
        }
        match text(layout, identity.filename) {
            Some(found)
                if lacking & lacks::FILENAME == 0
                    && copy(payload, qualname.bytes as usize, found.addr, found.bytes as usize) =>
            {
                filename = found;
            }
            _ => flags |= code::FILENAME_UNREADABLE,
        }
        if qualname.cut {
            flags |= code::QUALNAME_CUT;
        }
        if filename.cut {
            flags |= code::FILENAME_CUT;
        }
    }
    let mut total = walk::linetable_len(&CurrentProcess, layout, identity.linetable);
    if total > u64::from(MAX_LINETABLE_BYTES) {
        total = u64::from(MAX_LINETABLE_BYTES);
        flags |= code::LINETABLE_CUT;
    }
    let text_bytes = (qualname.bytes + filename.bytes) as usize;
    let mut part = 0;
    if lacking & lacks::LINETABLE != 0 || u64::from(start) > total {
        flags |= code::LINETABLE_UNREADABLE;
    } else {
        let left = total as u32 - start;
        part = if left as usize > LINETABLE_CHUNK { LINETABLE_CHUNK as u32 } else { left };
        let from = identity.linetable.wrapping_add(u64::from(layout.bytes_sval)).wrapping_add(u64::from(start));
        if !copy(payload, text_bytes, from, part as usize) {
            flags |= code::LINETABLE_UNREADABLE;
            part = 0;
        }
    }
    let bytes = (size_of::<CodeRecord>() + text_bytes + part as usize + 7) & !7;
    scratch.record = CodeRecord {
        header: RecordHeader { kind: kind::CODE, bank: sample.header.bank, event: 0, len: bytes as u32 },
        image: state.process.image,
        code: frame.code,
        fingerprint: frame.fingerprint,
        qualname: identity.qualname,
        filename: identity.filename,
        linetable: identity.linetable,
        tgid: sample.tgid,
        firstlineno: identity.firstlineno,
        layout: state.process.layout,
        flags,
        linetable_len: total as u32,
        linetable_start: start,
        qualname_bytes: qualname.bytes,
        filename_bytes: filename.bytes,
        linetable_bytes: part,
        qualname_kind: qualname.kind,
        filename_kind: filename.kind,
        _pad: [0; 2],
    };
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
    let reached = start + part;
    if flags & code::LINETABLE_UNREADABLE != 0 || u64::from(reached) >= total {
        set_progress(&Maps, key, SENT_ALL);
        Named::Done
    } else {
        set_progress(&Maps, key, reached);
        Named::Partly
    }
}

#[inline(always)]
fn share(slot: u32) -> Option<*mut Share> {
    SHARES.get_ptr_mut(slot)
}

/// `BPF_RB_NO_WAKEUP`: the sample that follows decides.
const NO_WAKEUP: u64 = 1;
