//! Code objects seen for the first time: their names and line tables, copied before anything can go away.

use crate::maps::{CODE, CodeScratch, KNOWN, KnownCode, SAMPLES, SENT, SENT_ALL, SentSlot, State, config};
use crate::memory::{CurrentProcess, masked};
use aya_ebpf::helpers::generated::{bpf_probe_read_user, bpf_ringbuf_output};
use tachyon_common::event::{CodeRecord, RawFrame, RecordHeader, code, kind};
use tachyon_common::layout::Layout;
use tachyon_common::limits::{
    KNOWN_SLOTS, LINETABLE_CHUNK, MAX_LINETABLE_BYTES, MAX_PENDING_CODES, MAX_TEXT_BYTES, SENT_SLOTS, SENT_WAYS,
};
use tachyon_common::process::ProcessEntry;
use tachyon_common::walk::{self, CodeIdentity, TextHash, mix};

/// Identity of a code object in one word (the fingerprint is keyed, so no target can aim for another's).
#[inline(always)]
fn key(image: u64, frame: &RawFrame) -> u64 {
    let key = mix(mix(frame.fingerprint, frame.code), image);
    if key == 0 { 1 } else { key }
}

/// What a walk knows of the code objects that it meets.
#[repr(C)]
pub struct Codes {
    /// What only code objects of one interpreter of one program in one process have: from `fork` on, parent and child give
    /// the same `co_version`s to different code objects, and so does what `exec` starts.
    pub owner: u64,
    /// `_code_object_generation` of this interpreter; 0: none.
    pub generation: u64,
    /// `PyCodeObject.co_version`; [`Layout::ABSENT`]: nothing is remembered.
    pub version_at: u32,
    /// 1 when the code object met last was known, else 0.
    pub known: u32,
    pub pending_count: u32,
    pub pending_next: u32,
    /// Indices into [`crate::maps::SampleScratch::frames`] of code objects not sent yet.
    pub pending: [u16; MAX_PENDING_CODES],
}

impl Codes {
    /// Forgets the code objects of the sample before.
    #[inline(always)]
    pub fn clear(&mut self) {
        self.pending_count = 0;
        self.pending_next = 0;
    }

    /// Starts with a thread of an interpreter. Without its id (a negative number) nothing is remembered.
    #[inline(always)]
    pub fn enter(&mut self, layout: &Layout, process: &ProcessEntry, interp_id: i64, generation: u64) {
        // Both are often the same number, and must not cancel each other out.
        self.owner = mix(mix(mix(0, process.instance), process.image), interp_id.cast_unsigned());
        self.generation = generation;
        self.version_at = if interp_id < 0 { Layout::ABSENT } else { layout.code_version };
    }

    /// Whether the code object at `code` is the one that was remembered of that address: [`Codes::known`]; then its
    /// fingerprint and code units are filled in. Remembered are only those of which everything was sent.
    ///
    /// It is the same one when no code object of its interpreter has been freed since (3.14+ count that), or when it has
    /// the same `co_version`, which no other one of its interpreter is given. Always 0.
    #[inline(always)]
    pub fn look_up(&mut self, code: u64, identity: &mut CodeIdentity) -> u64 {
        self.known = 0;
        if self.version_at == Layout::ABSENT {
            return 0;
        }
        let Some(slot) = known_slot(self.owner, code) else { return 0 };
        // SAFETY: a pointer into a map value, checked by the lookup; what racing writers tear has a wrong check.
        let mut found = unsafe { core::ptr::read_volatile(slot) };
        if found.code != code || found.owner != self.owner || found.check != found.sum() {
            return 0;
        }
        if self.generation == 0 || found.generation != self.generation {
            let version = walk::read_u32(&CurrentProcess, code, self.version_at);
            if version != Ok(found.version) {
                return 0;
            }
            if self.generation != 0 {
                found.generation = self.generation;
                found.check = found.sum();
                // SAFETY: as above.
                unsafe { core::ptr::write_volatile(slot, found) };
            }
        }
        identity.fingerprint = found.fingerprint;
        identity.code_units = found.code_units;
        self.known = 1;
        0
    }

    /// Notes that a frame stands at `index`: its code object will be sent, or is remembered when it has been and has a
    /// version. A function of its own for the verifier: its four places to look are not multiplied with what follows.
    #[inline(never)]
    pub fn note(&mut self, image: u64, index: usize, frame: &RawFrame, identity: &CodeIdentity) -> u64 {
        if progress(key(image, frame)) != SENT_ALL {
            let count = self.pending_count as usize;
            if count < MAX_PENDING_CODES {
                let at = masked::<{ MAX_PENDING_CODES as u32 - 1 }>(count);
                // SAFETY: masked to an element of the array.
                unsafe { self.pending.as_mut_ptr().add(at).write(index as u16) };
                self.pending_count += 1;
            }
            return 0;
        }
        if identity.version == 0 || self.version_at == Layout::ABSENT {
            return 0;
        }
        let Some(slot) = known_slot(self.owner, frame.code) else { return 0 };
        let mut entry = KnownCode {
            owner: self.owner,
            code: frame.code,
            fingerprint: frame.fingerprint,
            version: identity.version,
            code_units: identity.code_units,
            generation: self.generation,
            check: 0,
            _pad: [0; 2],
        };
        entry.check = entry.sum();
        // SAFETY: as in `look_up`.
        unsafe { core::ptr::write_volatile(slot, entry) };
        0
    }

    /// The frame whose code object is the next to be sent.
    #[inline(always)]
    pub fn next(&self) -> Option<usize> {
        let next = self.pending_next as usize;
        if next >= MAX_PENDING_CODES || next >= self.pending_count as usize {
            return None;
        }
        // SAFETY: masked to an element of the array.
        let index = unsafe { self.pending.as_ptr().add(masked::<{ MAX_PENDING_CODES as u32 - 1 }>(next)).read() };
        Some(usize::from(index))
    }
}

impl KnownCode {
    /// What [`KnownCode::check`] has to be. (The factors are odd and have nothing in common.)
    #[inline(always)]
    fn sum(&self) -> u64 {
        let sizes = u64::from(self.version) | (u64::from(self.code_units) << 32);
        let sum = (self.owner ^ self.fingerprint).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sum = sum ^ self.code.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        sum ^ sizes.wrapping_mul(0x1656_67b1_9e37_79f9) ^ self.generation.wrapping_mul(0xff51_afd7_ed55_8ccd)
    }
}

/// Code objects that lie together have slots that lie together: of a stack at a low rate, each page of either is cold. (They
/// have more than 128 bytes each.)
#[inline(always)]
fn known_slot(owner: u64, code: u64) -> Option<*mut KnownCode> {
    KNOWN.get_ptr_mut((owner.wrapping_add(code >> 7) as u32) & (KNOWN_SLOTS - 1))
}

#[inline(always)]
fn bucket(key: u64) -> Option<*mut SentSlot> {
    let bucket = SENT.get_ptr_mut((key as u32) & (SENT_SLOTS / SENT_WAYS - 1))?;
    Some(bucket.cast())
}

/// Bytes of the line table sent so far; 0: nothing sent.
#[inline(always)]
fn progress(key: u64) -> u32 {
    let Some(slots) = bucket(key) else { return 0 };
    let mut way = 0;
    while way < SENT_WAYS as usize {
        // SAFETY: `way` is inside the bucket the lookup returned.
        let slot = unsafe { slots.add(way) };
        // SAFETY: a word of a map value.
        let found = unsafe { core::ptr::read_volatile(&raw const (*slot).key) };
        if found == key {
            // SAFETY: as above.
            return unsafe { core::ptr::read_volatile(&raw const (*slot).progress) };
        }
        way += 1;
    }
    0
}

#[inline(always)]
fn set_progress(key: u64, progress: u32) {
    let Some(slots) = bucket(key) else { return };
    // The slot of this key, else an empty one, else one chosen by bits the bucket's index does not use.
    let mut chosen = (key >> 40) as usize & (SENT_WAYS as usize - 1);
    let mut way = 0;
    while way < SENT_WAYS as usize {
        // SAFETY: `way` is inside the bucket the lookup returned.
        let slot = unsafe { slots.add(way) };
        // SAFETY: a word of a map value.
        let found = unsafe { core::ptr::read_volatile(&raw const (*slot).key) };
        if found == key {
            chosen = way;
            break;
        }
        if found == 0 {
            chosen = way;
        }
        way += 1;
    }
    // SAFETY: `chosen` is masked to a slot of the bucket.
    let slot = unsafe { slots.add(masked::<{ SENT_WAYS - 1 }>(chosen)) };
    // SAFETY: a word of a map value.
    unsafe { core::ptr::write_volatile(&raw mut (*slot).progress, progress) };
    // SAFETY: as above.
    unsafe { core::ptr::write_volatile(&raw mut (*slot).key, key) };
}

/// A string object's text.
#[derive(Clone, Copy, Default)]
struct Text {
    addr: u64,
    bytes: u32,
    kind: u8,
    cut: bool,
}

/// Where a string's text is; `None` when the string cannot be read or is not compact.
#[inline(always)]
fn text(layout: &Layout, object: u64) -> Option<Text> {
    let state = walk::read_u32(&CurrentProcess, object, layout.unicode_state).ok()?;
    let length = walk::read_u64(&CurrentProcess, object, layout.unicode_length).ok()?;
    if state & layout.unicode_compact_bit == 0 {
        return None;
    }
    let kind = (state >> (layout.unicode_kind_shift & 31)) & 7;
    let ascii = state & layout.unicode_ascii_bit != 0;
    if kind != 1 && kind != 2 && kind != 4 {
        return None;
    }
    let start = if ascii { layout.unicode_ascii_size } else { layout.unicode_compact_size };
    // `length` is the target's word: compare before multiplying. The cut keeps whole code points (4,088 = 4 * 1,022).
    let cut = length > (MAX_TEXT_BYTES as u64) / u64::from(kind);
    let bytes = if cut { MAX_TEXT_BYTES as u32 } else { (length as u32).wrapping_mul(kind) };
    Some(Text { addr: object.wrapping_add(u64::from(start)), bytes, kind: kind as u8, cut })
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
    /// Nothing more to send.
    Done,
    /// A part was sent; more is to come.
    Partly,
    /// The ring is full: try with another sample.
    RingFull,
}

/// Sends the next record of the code object of `frame`.
#[inline(always)]
pub fn send(state: &mut State, layout: &Layout, tgid: u32, frame: &RawFrame) -> Named {
    let key = key(state.process.image, frame);
    let start = progress(key);
    if start == SENT_ALL {
        return Named::Done;
    }
    let Some(scratch) = CODE.get_ptr_mut(0) else { return Named::Done };
    let seed = config!(seed);
    let (code_buffer, file) = (&mut state.code_buffer, &mut TextHash::default());
    let Ok(identity) = walk::code_identity(&CurrentProcess, layout, seed, frame.code, code_buffer, file) else {
        return Named::Done;
    };
    if identity.fingerprint != frame.fingerprint {
        return Named::Done;
    }
    // SAFETY: the scratch value is this CPU's own, and only the timer's programs, which do not nest, use it.
    let scratch: &mut CodeScratch = unsafe { &mut *scratch };
    let payload = scratch.payload.as_mut_ptr();
    let mut flags = 0;
    let mut qualname = Text { kind: 1, ..Text::default() };
    let mut filename = Text { kind: 1, ..Text::default() };
    if start == 0 {
        match text(layout, identity.qualname) {
            Some(found) if copy(payload, 0, found.addr, found.bytes as usize) => qualname = found,
            _ => flags |= code::QUALNAME_UNREADABLE,
        }
        match text(layout, identity.filename) {
            Some(found) if copy(payload, qualname.bytes as usize, found.addr, found.bytes as usize) => filename = found,
            _ => flags |= code::FILENAME_UNREADABLE,
        }
        if qualname.cut {
            flags |= code::QUALNAME_CUT;
        }
        if filename.cut {
            flags |= code::FILENAME_CUT;
        }
    }
    let total = walk::linetable_len(&CurrentProcess, layout, identity.linetable);
    let text_bytes = (qualname.bytes + filename.bytes) as usize;
    let mut part = 0;
    if total > u64::from(MAX_LINETABLE_BYTES) || u64::from(start) > total {
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
        header: RecordHeader { kind: kind::CODE, flags: 0, len: bytes as u32 },
        image: state.process.image,
        code: frame.code,
        fingerprint: frame.fingerprint,
        qualname: identity.qualname,
        filename: identity.filename,
        linetable: identity.linetable,
        tgid,
        firstlineno: identity.firstlineno,
        layout: state.process.layout,
        flags,
        linetable_len: if total > u64::from(u32::MAX) { u32::MAX } else { total as u32 },
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
    let reached = start + part;
    if flags & code::LINETABLE_UNREADABLE != 0 || u64::from(reached) >= total {
        set_progress(key, SENT_ALL);
        Named::Done
    } else {
        set_progress(key, reached);
        Named::Partly
    }
}

/// `BPF_RB_NO_WAKEUP`: the sample that follows decides.
const NO_WAKEUP: u64 = 1;
