//! Python's own objects read from outside: dictionaries, integers, attributes of instances.
//!
//! Only what leads to a name. Everything is bounded, and whatever does not look as it should is `None`: the target may
//! be changing it at this moment, and a name that cannot be read is no great loss.

use crate::inspect::{Attributes, ObjectLayout};
use crate::symbolize::text;
use tachyon_common::layout::Layout;
use tachyon_common::walk::{UserMemory, read_u32, read_u64};

/// Most entries of one dictionary: `sys.modules` of a large program has a tenth of that.
const MAX_ENTRIES: u64 = 1 << 16;

/// Most characters of a string.
const MAX_TEXT: u64 = 4096;

/// `Py_TPFLAGS_MANAGED_DICT` (Include/object.h, 3.11+).
const MANAGED_DICT: u64 = 1 << 4;
/// `Py_TPFLAGS_INLINE_VALUES` (Include/object.h, 3.13+).
const INLINE_VALUES: u64 = 1 << 2;

/// `DICT_KEYS_GENERAL` (pycore_dict.h, 3.11+): entries with hashes; the other kinds have none.
const KEYS_GENERAL: u8 = 0;

/// A target's objects.
pub(super) struct Objects<'a, M: ?Sized> {
    pub memory: &'a M,
    pub layout: &'a Layout,
    pub objects: &'a ObjectLayout,
}

/// Key and value; 0 where there is none (or none any more).
type Entry = (u64, u64);

impl<M: UserMemory + ?Sized> Objects<'_, M> {
    /// A pointer or other word.
    pub(super) fn word(&self, base: u64, offset: u64) -> Option<u64> {
        read_u64(self.memory, base.checked_add(offset)?, 0).ok()
    }

    /// A pointer that is not NULL.
    pub(super) fn pointer(&self, base: u64, offset: u64) -> Option<u64> {
        self.word(base, offset).filter(|&pointer| pointer != 0)
    }

    /// The entries of a dictionary in insertion order.
    pub(super) fn entries(&self, dict: u64) -> Option<Vec<Entry>> {
        let keys = self.keys(self.pointer(dict, self.objects.dict_keys)?)?;
        match self.word(dict, self.objects.dict_values)? {
            0 => Some(keys),
            values => Some(self.with_values(keys, values)),
        }
    }

    /// The value of a key that is an ASCII string.
    pub(super) fn find(&self, dict: u64, key: &str) -> Option<u64> {
        self.value(self.entries(dict)?, key)
    }

    /// An attribute in an instance's own dictionary.
    pub(super) fn attribute(&self, instance: u64, name: &str) -> Option<u64> {
        let objects = self.objects;
        let kind = self.pointer(instance, u64::from(self.layout.ob_type))?;
        let flags = self.word(kind, objects.type_flags)?;
        if objects.attributes == Attributes::Dict || flags & MANAGED_DICT == 0 {
            let offset = self.word(kind, objects.type_dictoffset)?;
            return self.find(self.pointer(instance, offset)?, name);
        }
        let managed = instance.checked_add_signed(objects.managed_dict?)?;
        let shared = |values: u64| {
            let keys = self.keys(self.pointer(kind, objects.heap_type_cached_keys?)?)?;
            self.value(self.with_values(keys, values), name)
        };
        match objects.attributes {
            Attributes::ValuesPointer => match self.word(managed.checked_sub(8)?, 0)? {
                0 => self.find(self.pointer(managed, 0)?, name),
                values => shared(values),
            },
            Attributes::TaggedPointer => match self.pointer(managed, 0)? {
                tagged if tagged & 1 == 1 => shared(tagged.checked_add(1)?),
                dict => self.find(dict, name),
            },
            Attributes::Inline => match self.word(managed, 0)? {
                0 if flags & INLINE_VALUES != 0 => {
                    shared(instance.checked_add(self.word(kind, objects.type_basicsize)?)?)
                }
                dict => self.find(Some(dict).filter(|&dict| dict != 0)?, name),
            },
            Attributes::Dict => None,
        }
    }

    /// A positive integer below 2^64. (Digits have 30 bits: builds with 15 give wrong numbers, hence no names.)
    pub(super) fn integer(&self, object: u64) -> Option<u64> {
        let tag = self.word(object, self.objects.long_tag)?;
        // 3.12+: the number of digits from bit 3 on, and the sign below it: 0 is positive (pycore_long.h).
        let digits = if self.layout.minor_version() >= (3, 12) { if tag & 3 == 0 { tag >> 3 } else { 0 } } else { tag };
        if !(1..=3).contains(&digits) {
            return None;
        }
        let digit = |at: u64| read_u32(self.memory, object.checked_add(self.objects.long_digit + at * 4)?, 0).ok();
        (0..digits).rev().try_fold(0_u64, |sum, at| {
            let high = sum.checked_mul(1 << 30)?;
            high.checked_add(u64::from(digit(at)?))
        })
    }

    /// A string, unless it claims an absurd length: that would show whatever memory follows it.
    pub(super) fn text(&self, object: u64) -> Option<String> {
        self.word(object, u64::from(self.layout.unicode_length)).filter(|&length| length <= MAX_TEXT)?;
        text::read(self.memory, self.layout, object).ok()
    }

    /// The first value whose key is this ASCII string.
    fn value(&self, entries: Vec<Entry>, key: &str) -> Option<u64> {
        let found = entries.into_iter().find(|&(at, value)| at != 0 && value != 0 && self.is_text(at, key));
        found.map(|(_, value)| value)
    }

    fn is_text(&self, object: u64, wanted: &str) -> bool {
        let layout = self.layout;
        let Ok(state) = read_u32(self.memory, object, layout.unicode_state) else { return false };
        let plain = layout.unicode_ascii_bit | layout.unicode_compact_bit;
        if state & plain != plain || self.word(object, u64::from(layout.unicode_length)) != Some(wanted.len() as u64) {
            return false;
        }
        let mut bytes = vec![0; wanted.len()];
        let start = object.wrapping_add(u64::from(layout.unicode_ascii_size));
        self.memory.read(start, &mut bytes).is_ok() && bytes == wanted.as_bytes()
    }

    /// The entries of a table of keys; values are 0 where they are kept elsewhere.
    fn keys(&self, keys: u64) -> Option<Vec<Entry>> {
        let objects = self.objects;
        let count = self.word(keys, objects.keys_nentries).filter(|&count| count <= MAX_ENTRIES)?;
        let (index_bytes, entry_words) = match objects.keys_kind {
            Some(kind) => {
                let [_, log2_index_bytes, ..] = self.word(keys, objects.keys_size)?.to_le_bytes();
                let mut kind_byte = [0];
                self.memory.read(keys.checked_add(kind)?, &mut kind_byte).ok()?;
                let words = if kind_byte[0] == KEYS_GENERAL { 3 } else { 2 };
                (1_u64.checked_shl(u32::from(log2_index_bytes)).filter(|&bytes| bytes <= 8 * MAX_ENTRIES)?, words)
            }
            None => {
                let size = self.word(keys, objects.keys_size)?;
                let width = match size {
                    0..=0xff => 1,
                    0x100..=0xffff => 2,
                    0x1_0000..=0xffff_ffff => 4,
                    _ => 8,
                };
                (size.checked_mul(width)?, 3)
            }
        };
        let start = keys.checked_add(objects.keys_indices)?.checked_add(index_bytes)?;
        let mut bytes = vec![0; usize::try_from(count).ok()? * entry_words * 8];
        self.memory.read(start, &mut bytes).ok()?;
        let (words, _) = bytes.as_chunks::<8>();
        let entry = |entry: &[[u8; 8]]| match entry {
            [.., key, value] => (u64::from_ne_bytes(*key), u64::from_ne_bytes(*value)),
            _ => (0, 0),
        };
        Some(words.chunks(entry_words).map(entry).collect())
    }

    fn with_values(&self, keys: Vec<Entry>, values: u64) -> Vec<Entry> {
        let start = values.wrapping_add(self.objects.values_start);
        let value = |at: usize| self.word(start, at as u64 * 8).unwrap_or(0);
        keys.into_iter().enumerate().map(|(at, (key, _))| (key, value(at))).collect()
    }
}
