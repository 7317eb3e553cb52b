//! Which code objects have been sent, and which need not be read again.
//!
//! Two tables, both written by all CPUs without a lock: an entry that is overwritten or torn costs reading or sending a code
//! object again, and is never taken for another one's. Where they lie is behind [`CodeTables`]: BPF maps, or a test's memory.

use crate::layout::Layout;
use crate::limits::{KNOWN_SLOTS, MAX_PENDING_CODES, SENT_SLOTS, SENT_WAYS};
use crate::walk::{CodeIdentity, UserMemory, mix, read_u32};

/// One code object of the table of those that were sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct SentSlot {
    /// [`sent_key`]; 0: empty.
    pub key: u64,
    /// Bytes of the line table sent so far; [`SENT_ALL`]: everything.
    pub progress: u32,
    /// Explicit padding.
    pub _pad: u32,
}

/// [`SentSlot::progress`] of a code object of which everything was sent.
pub const SENT_ALL: u32 = u32::MAX;

/// What one process's code object at one address is, and what proves that it still is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct KnownCode {
    /// [`Codes::owner`].
    pub owner: u64,
    /// Address of the `PyCodeObject`.
    pub code: u64,
    /// [`CodeIdentity::fingerprint`].
    pub fingerprint: u64,
    /// [`CodeIdentity::version`].
    pub version: u32,
    /// [`CodeIdentity::code_units`].
    pub code_units: u32,
    /// `_code_object_generation` when it was last seen to be the same; 0: none.
    pub generation: u64,
    /// Of all the others: an entry that two writers have torn is a miss.
    pub check: u64,
    /// Explicit padding.
    pub _pad: [u64; 2],
}

impl KnownCode {
    /// What [`KnownCode::check`] has to be. (The factors are odd and have nothing in common.)
    #[inline(always)]
    #[must_use]
    pub const fn sum(&self) -> u64 {
        let sizes = self.version as u64 | ((self.code_units as u64) << 32);
        let sum = (self.owner ^ self.fingerprint).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sum = sum ^ self.code.wrapping_mul(0xc2b2_ae3d_27d4_eb4f);
        sum ^ sizes.wrapping_mul(0x1656_67b1_9e37_79f9) ^ self.generation.wrapping_mul(0xff51_afd7_ed55_8ccd)
    }
}

/// Where the two tables lie. No read or write of a word is torn; a whole entry may be.
pub trait CodeTables {
    /// A bucket of [`SENT_WAYS`] slots.
    type Bucket: Copy;

    /// The entry in a slot below [`KNOWN_SLOTS`].
    fn known(&self, slot: u32) -> Option<KnownCode>;
    /// Writes it.
    fn set_known(&self, slot: u32, entry: &KnownCode);
    /// The bucket at an index below [`SENT_SLOTS`] / [`SENT_WAYS`].
    fn bucket(&self, index: u32) -> Option<Self::Bucket>;
    /// A bucket's slot below [`SENT_WAYS`].
    fn sent(&self, bucket: Self::Bucket, way: u32) -> SentSlot;
    /// Writes it.
    fn set_sent(&self, bucket: Self::Bucket, way: u32, slot: SentSlot);
}

/// A code object's name among those that were sent: by what is shown of it, so that what a forked child makes at the same
/// address is another one, and what it has from its parent is not sent again. (The fingerprint is keyed, so no target can
/// aim for another's.)
#[inline(always)]
#[must_use]
pub const fn sent_key(image: u64, code: u64, fingerprint: u64) -> u64 {
    let key = mix(mix(fingerprint, code), image);
    if key == 0 { 1 } else { key }
}

#[inline(always)]
const fn bucket_of(key: u64) -> u32 {
    (key as u32) & (SENT_SLOTS / SENT_WAYS - 1)
}

/// Bytes of the line table sent so far; 0: nothing sent; [`SENT_ALL`].
#[inline(always)]
pub fn progress<T: CodeTables + ?Sized>(tables: &T, key: u64) -> u32 {
    let Some(bucket) = tables.bucket(bucket_of(key)) else { return 0 };
    let mut way = 0;
    while way < SENT_WAYS {
        let slot = tables.sent(bucket, way);
        if slot.key == key {
            return slot.progress;
        }
        way += 1;
    }
    0
}

/// Takes down how much was sent.
#[inline(always)]
pub fn set_progress<T: CodeTables + ?Sized>(tables: &T, key: u64, progress: u32) {
    let Some(bucket) = tables.bucket(bucket_of(key)) else { return };
    // The slot of this key, else an empty one, else one chosen by bits that the bucket's index does not use.
    let mut chosen = (key >> 40) as u32 & (SENT_WAYS - 1);
    let mut way = 0;
    while way < SENT_WAYS {
        let found = tables.sent(bucket, way).key;
        if found == key {
            chosen = way;
            break;
        }
        if found == 0 {
            chosen = way;
        }
        way += 1;
    }
    tables.set_sent(bucket, chosen, SentSlot { key, progress, _pad: 0 });
}

/// Code objects that lie together have slots that lie together: of a stack at a low rate, each page of either is cold. (They
/// have more than 128 bytes each.)
#[inline(always)]
const fn known_slot(owner: u64, code: u64) -> u32 {
    (owner.wrapping_add(code >> 7) as u32) & (KNOWN_SLOTS - 1)
}

/// What a walk knows of the code objects that it meets.
#[derive(Clone, Copy, Debug)]
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
    /// Code objects that are to be sent.
    pub pending_count: u32,
    /// The next of them.
    pub pending_next: u32,
    /// Frames of the sample whose code objects these are, and above that what they lack.
    pub pending: [u16; MAX_PENDING_CODES],
}

impl Default for Codes {
    fn default() -> Self {
        Self {
            owner: 0,
            generation: 0,
            version_at: Layout::ABSENT,
            known: 0,
            pending_count: 0,
            pending_next: 0,
            pending: [0; MAX_PENDING_CODES],
        }
    }
}

/// Bits of [`Codes::pending`] that are the frame's index.
const INDEX_BITS: u32 = 10;

const _: () = assert!(crate::limits::MAX_PY_FRAMES <= 1 << INDEX_BITS && MAX_PENDING_CODES.is_power_of_two());

impl Codes {
    /// Forgets the code objects of the sample before.
    #[inline(always)]
    pub const fn clear(&mut self) {
        self.pending_count = 0;
        self.pending_next = 0;
    }

    /// Starts with a thread of an interpreter of a program (`image`) in a process (`instance`). Without the interpreter's
    /// id (a negative number) nothing is remembered.
    #[inline(always)]
    pub const fn enter(&mut self, layout: &Layout, (instance, image): (u64, u64), interp_id: i64, generation: u64) {
        // Both are often the same number, and must not cancel each other out.
        self.owner = mix(mix(mix(0, instance), image), interp_id.cast_unsigned());
        self.generation = generation;
        self.version_at = if interp_id < 0 { Layout::ABSENT } else { layout.code_version };
    }

    /// Whether the code object at `code` is the one that was remembered of that address: [`Codes::known`]; then its
    /// fingerprint and code units are filled in. Remembered are only those of which everything was sent. Always 0.
    ///
    /// It is the same one when no code object of its interpreter has been freed since (3.14+ count that), or when it has
    /// the same `co_version`, which no other one of its interpreter is given.
    #[inline(always)]
    pub fn look_up<M, T>(&mut self, memory: &M, tables: &T, code: u64, identity: &mut CodeIdentity) -> u64
    where
        M: UserMemory + ?Sized,
        T: CodeTables + ?Sized,
    {
        self.known = 0;
        if self.version_at == Layout::ABSENT {
            return 0;
        }
        let slot = known_slot(self.owner, code);
        let Some(mut found) = tables.known(slot) else { return 0 };
        if found.code != code || found.owner != self.owner || found.check != found.sum() {
            return 0;
        }
        if self.generation == 0 || found.generation != self.generation {
            let version = read_u32(memory, code, self.version_at);
            if version != Ok(found.version) {
                return 0;
            }
            if self.generation != 0 {
                found.generation = self.generation;
                found.check = found.sum();
                tables.set_known(slot, &found);
            }
        }
        identity.fingerprint = found.fingerprint;
        identity.code_units = found.code_units;
        self.known = 1;
        0
    }

    /// Notes that the frame at `index` runs `code`, which was read in this sample: it will be sent, or is remembered when it
    /// has been sent, is whole and has a version.
    #[inline(always)]
    pub fn note<T: CodeTables + ?Sized>(
        &mut self,
        tables: &T,
        image: u64,
        index: usize,
        code: u64,
        identity: &CodeIdentity,
    ) {
        if progress(tables, sent_key(image, code, identity.fingerprint)) != SENT_ALL {
            let count = self.pending_count as usize;
            if count < MAX_PENDING_CODES {
                // The mask is the bound that the verifier sees.
                self.pending[count & (MAX_PENDING_CODES - 1)] = (index as u32 | identity.lacks << INDEX_BITS) as u16;
                self.pending_count += 1;
            }
            return;
        }
        if identity.version == 0 || identity.lacks != 0 || self.version_at == Layout::ABSENT {
            return;
        }
        let mut entry = KnownCode {
            owner: self.owner,
            code,
            fingerprint: identity.fingerprint,
            version: identity.version,
            code_units: identity.code_units,
            generation: self.generation,
            check: 0,
            _pad: [0; 2],
        };
        entry.check = entry.sum();
        tables.set_known(known_slot(self.owner, code), &entry);
    }

    /// The frame whose code object is the next to be sent, and what that lacks: bits of [`crate::walk::lacks`].
    #[inline(always)]
    #[must_use]
    pub const fn next(&self) -> Option<(usize, u32)> {
        let next = self.pending_next as usize;
        if next >= MAX_PENDING_CODES || next >= self.pending_count as usize {
            return None;
        }
        let pending = self.pending[next & (MAX_PENDING_CODES - 1)] as u32;
        Some(((pending & ((1 << INDEX_BITS) - 1)) as usize, pending >> INDEX_BITS))
    }
}

const _: () = assert!(size_of::<SentSlot>() == 16);
const _: () = assert!(size_of::<KnownCode>() == 64);
const _: () = assert!(size_of::<Codes>() == 32 + 2 * MAX_PENDING_CODES);
