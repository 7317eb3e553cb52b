//! The symbolizer: code objects known so far, frames made from them, and what is still missing.

use super::cache::LineTables;
use super::code_object::{
    BadCodeRecord, Code, CodeKey, LiveCode, Part, ReadCodeError, Seen, Table, UNKNOWN_FILE, UNKNOWN_FUNCTION, Use,
    is_shim,
};
use super::linetable::{Format, LineTable};
use crate::profile::{Frame, FrameId, Profile, StrId};
use crate::remote::ledger::stock::{Owner, Stock};
use foldhash::fast::RandomState;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use tachyon_common::event::frame::UNKNOWN_LASTI;
use tachyon_common::event::{CodeRecord, code as code_flags};
use tachyon_common::layout::Layout;
use tachyon_common::walk::UserMemory;

/// What one frame costs here and in the profile: an entry in each of four tables.
const FRAME_BYTES: usize = 160;

/// What a string costs in addition to its bytes.
const STRING_BYTES: usize = 64;

/// What one code object costs in addition to its names and line table.
const CODE_BYTES: usize = size_of::<Code>() + 2 * size_of::<CodeKey>();

/// How many times one code object is read from a live process before giving up: a page may just be swapped out.
const MAX_FAILED_READS: u8 = 3;

/// Names code and remembers what it has learnt. See the [module documentation](super).
#[derive(Debug, Default)]
pub struct Symbolizer {
    codes: HashMap<CodeKey, Code, RandomState>,
    frames: HashMap<FrameKey, FrameId, RandomState>,
    /// Those of `codes` that are the interpreter's own; few, so that each frame of each sample can be looked up here.
    shims: HashSet<CodeKey, RandomState>,
    images: HashMap<u64, Image, RandomState>,
    /// What is kept for each process and user, which is bounded.
    stock: Stock,
    tables: LineTables,
    /// Frames that lack a name.
    unnamed: HashSet<FrameId, RandomState>,
    /// Codes that lack something and have not been given up.
    incomplete: BTreeSet<CodeKey>,
    /// Nothing more may be learnt: memory is short.
    full: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct FrameKey {
    key: CodeKey,
    lasti: i32,
    opcode: u8,
}

#[derive(Debug, Default)]
struct Image {
    codes: Vec<CodeKey>,
    /// Bytes that are free once it is forgotten.
    held: usize,
    owner: Owner,
    health: ImageHealth,
}

impl Image {
    /// This much more is kept as long as the image exists.
    fn hold(&mut self, stock: &mut Stock, bytes: usize) {
        self.held += bytes;
        stock.add(self.owner, bytes, 0);
    }
}

/// How plausible the code objects of one memory image are: a layout that does not fit its interpreter shows here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ImageHealth {
    /// Code objects whose names or line table arrived.
    pub codes: u64,
    /// Names that are not valid strings.
    pub bad_names: u64,
    /// Whole line tables that cannot be decoded to their end.
    pub bad_tables: u64,
    /// Frames whose instruction lies past the end of the line table.
    pub outside: u64,
}

impl ImageHealth {
    /// Whether nothing at all is wrong. Healthy interpreters have no bad code objects.
    #[must_use]
    pub const fn is_sound(&self) -> bool {
        self.bad_names == 0 && self.bad_tables == 0 && self.outside == 0
    }
}

/// A code object that lacks names or line table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Which.
    pub key: CodeKey,
    /// Process (initial pid namespace) it was copied from; `None` if no record arrived: any process of the image has it.
    pub tgid: Option<u32>,
    /// Index of its layout, likewise.
    pub layout: Option<u32>,
    /// A name is missing or was cut.
    pub names: bool,
    /// The line table, or a part of it, is missing.
    pub linetable: bool,
}

impl Symbolizer {
    /// A symbolizer that knows nothing yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Notes which process owns an image, asking `owner` if that is not known yet. What is kept for an image that was never
    /// announced is charged to no process.
    pub fn begin_image(&mut self, image: u64, owner: impl FnOnce() -> Owner) {
        self.images.entry(image).or_insert_with(|| Image { owner: owner(), ..Image::default() });
    }

    /// Sets what may be kept for processes and users, from a limit for all memory.
    pub fn limit(&mut self, memory: u64) {
        self.stock.limit(memory);
    }

    /// Who was refused names since the last call, in words.
    pub fn refused(&mut self) -> Vec<String> {
        self.stock.refused()
    }

    /// Takes one code record with its payload (what follows the record, padding allowed). Parts of a line table may
    /// arrive in any order and more than once. Pending frames of the code object get what has become known.
    ///
    /// # Errors
    /// When the record contradicts itself or its names are not valid strings; what is usable is used nevertheless.
    pub fn add_code(
        &mut self,
        profile: &mut Profile,
        record: &CodeRecord,
        payload: &[u8],
        layout: &Layout,
    ) -> Result<(), BadCodeRecord> {
        let part = Part::split(record, payload)?;
        let key = CodeKey::from(record);
        if self.full && !self.codes.contains_key(&key) {
            return Err(BadCodeRecord::Full);
        }
        let image = self.images.entry(key.image).or_default();
        let stock = &mut self.stock;
        if !stock.has_room(image.owner) {
            return Err(BadCodeRecord::Budget(key.image));
        }
        let code = self.codes.entry(key).or_insert_with(|| unseen(image, stock, &mut self.incomplete, key));
        if code.is_complete() {
            return Ok(());
        }
        let format = Format::of(layout);
        if code.seen.is_none() {
            image.health.codes += 1;
            let &CodeRecord { tgid, layout, firstlineno, .. } = record;
            code.seen = Some(Seen { tgid, layout, format, firstlineno });
        }
        if is_shim(record.qualname, record.filename, record.firstlineno) {
            self.shims.insert(key);
        }
        let mut bad = None;
        match part.qualname(record) {
            Ok(Some(name)) => learn(&mut code.qualname, profile, image, stock, &name),
            Ok(None) => {}
            Err(why) => bad = Some(BadCodeRecord::Qualname(why)),
        }
        match part.filename(record) {
            Ok(Some(name)) => learn(&mut code.filename, profile, image, stock, &name),
            Ok(None) => {}
            Err(why) => bad = bad.or(Some(BadCodeRecord::Filename(why))),
        }
        image.health.bad_names += u64::from(bad.is_some());
        // A table without bytes is one whose length could not be read: there is no code without instructions, and only
        // a `co_lnotab` can be empty.
        let readable = record.linetable_len != 0 || format == Format::Lnotab;
        if let Some(bytes) = part.linetable.filter(|_| readable) {
            image.hold(stock, bytes.len());
            let cut = record.flags & code_flags::LINETABLE_CUT != 0;
            if let Some((bytes, whole)) = code.add_part(record.linetable_start, bytes, record.linetable_len, cut) {
                let table = LineTable::new(format, record.firstlineno, bytes, whole);
                code.table = Table::Ready(keep(&mut self.tables, image, stock, table));
            }
        }
        self.update_frames(profile, key, false);
        bad.map_or(Ok(()), Err)
    }

    /// The frame of `key` at instruction `lasti` (as [`tachyon_common::event::RawFrame`] has it), the same for the same
    /// arguments. `opcode` is [`Frame::NO_OPCODE`] when it was not recorded.
    pub fn frame(&mut self, profile: &mut Profile, key: CodeKey, lasti: i32, opcode: u8) -> FrameId {
        let frame_key = FrameKey { key, lasti: lasti.max(UNKNOWN_LASTI), opcode };
        match self.frames.get(&frame_key) {
            Some(&frame) => frame,
            None => self.new_frame(profile, frame_key),
        }
    }

    fn new_frame(&mut self, profile: &mut Profile, frame_key: FrameKey) -> FrameId {
        let FrameKey { key, lasti, opcode } = frame_key;
        let image = self.images.entry(key.image).or_default();
        let stock = &mut self.stock;
        if self.full || !stock.has_room(image.owner) {
            let known = self.codes.get(&key).and_then(|code| code.filename.zip(code.qualname));
            if let Some((filename, function)) = known {
                // One frame per code object: one per line would be many.
                return profile.frames.intern(Frame::without_location(filename, function));
            }
            let filename = profile.strings.intern(UNKNOWN_FILE);
            let function = profile.strings.intern(UNKNOWN_FUNCTION);
            let frame = profile.frames.intern(Frame::without_location(filename, function));
            self.unnamed.insert(frame);
            return frame;
        }
        stock.add(image.owner, 0, FRAME_BYTES);
        let code = self.codes.entry(key).or_insert_with(|| unseen(image, stock, &mut self.incomplete, key));
        let value = code.frame(lasti, opcode, &mut profile.strings);
        let pending = !code.is_complete();
        let frame = if pending { profile.frames.push_pending(value) } else { profile.frames.intern(value) };
        if !pending {
            image.health.outside += u64::from(!code.covers(lasti));
        }
        if !code.is_named() {
            self.unnamed.insert(frame);
        }
        code.uses.push(Use { lasti, opcode, pending, frame });
        self.frames.insert(frame_key, frame);
        frame
    }

    /// Whether a code object is known to be one of the interpreter's own, whose frames Python never shows.
    #[must_use]
    pub fn is_shim(&self, key: CodeKey) -> bool {
        self.shims.contains(&key)
    }

    /// Whether both names of `frame` are known. Frames that other modules make always are.
    #[must_use]
    pub fn is_named(&self, frame: FrameId) -> bool {
        !self.unnamed.contains(&frame)
    }

    /// Whether [`Symbolizer::missing`] has any to report.
    #[must_use]
    pub fn is_missing_any(&self) -> bool {
        !self.incomplete.is_empty()
    }

    /// Code objects that lack names or line table, by image and address. The rest of a long line table may be on its
    /// way, so this is best called some time after the samples. A code object that turned out to be gone, or could not
    /// be read a few times, is not listed again.
    #[must_use]
    pub fn missing(&self) -> Vec<Missing> {
        let missing = |&key: &CodeKey| {
            let code = self.codes.get(&key)?;
            Some(Missing {
                key,
                tgid: code.seen.map(|seen| seen.tgid),
                layout: code.seen.map(|seen| seen.layout),
                names: !code.is_named(),
                linetable: !code.has_table(),
            })
        };
        self.incomplete.iter().filter_map(missing).collect()
    }

    /// Reads a missing code object from a live process of its image. `seed` is the one the fingerprints were made with.
    ///
    /// # Errors
    /// When the process cannot be read, or another object is there by now.
    pub fn read_missing<M: UserMemory + ?Sized>(
        &mut self,
        profile: &mut Profile,
        key: CodeKey,
        layout: &Layout,
        seed: u64,
        memory: &M,
    ) -> Result<(), ReadCodeError> {
        let Some(code) = self.codes.get_mut(&key) else { return Ok(()) };
        let (image, stock) = (self.images.entry(key.image).or_default(), &mut self.stock);
        if !stock.has_room(image.owner) {
            self.incomplete.remove(&key);
            return Err(ReadCodeError::Budget(key.image));
        }
        match LiveCode::read(memory, layout, seed, key) {
            Ok(live) => {
                image.health.codes += u64::from(code.seen.is_none() && !code.has_table());
                if live.shim {
                    self.shims.insert(key);
                }
                learn(&mut code.qualname, profile, image, stock, &live.qualname);
                learn(&mut code.filename, profile, image, stock, &live.filename);
                if !code.has_table() {
                    code.table = Table::Ready(keep(&mut self.tables, image, stock, live.table(layout)));
                }
                self.update_frames(profile, key, false);
                Ok(())
            }
            Err(why) => {
                code.failed_reads = code.failed_reads.saturating_add(1);
                image.health.bad_names += u64::from(matches!(why, ReadCodeError::Text { .. }));
                if code.failed_reads >= MAX_FAILED_READS || !matches!(why, ReadCodeError::Unreadable(_)) {
                    self.incomplete.remove(&key);
                }
                Err(why)
            }
        }
    }

    /// Gives every frame that is still pending what is known about it, or else CPython's `<unknown function>` and
    /// `<unknown file>`.
    pub fn finish(&mut self, profile: &mut Profile) {
        for key in std::mem::take(&mut self.incomplete) {
            self.update_frames(profile, key, true);
        }
        let given_up: Vec<_> = self.codes.iter().filter(|(_, code)| !code.is_complete()).map(|(&key, _)| key).collect();
        for key in given_up {
            self.update_frames(profile, key, true);
        }
    }

    /// Forgets an image whose last process is gone: its frames stay in the profile, everything else is freed.
    pub fn forget(&mut self, profile: &mut Profile, image: u64) {
        let Some(image) = self.images.remove(&image) else { return };
        self.stock.free(image.owner, image.held);
        for key in image.codes {
            self.update_frames(profile, key, true);
            self.incomplete.remove(&key);
            self.shims.remove(&key);
            let Some(code) = self.codes.remove(&key) else { continue };
            for Use { lasti, opcode, .. } in code.uses {
                self.frames.remove(&FrameKey { key, lasti, opcode });
            }
        }
    }

    /// From now on frames belong to the profile `next`: names are carried over, frames are made anew when they are asked
    /// for. In the previous profile they keep the names that they have.
    pub fn begin_profile(&mut self, ended: &Profile, next: &mut Profile) {
        self.frames.clear();
        self.unnamed.clear();
        self.stock.begin_profile();
        for (key, code) in &mut self.codes {
            for name in code.qualname.iter_mut().chain(&mut code.filename) {
                let text = ended.strings.get(*name);
                let before = next.strings.len();
                *name = next.strings.intern(text);
                if let Some(image) = self.images.get(&key.image).filter(|_| next.strings.len() > before) {
                    self.stock.add(image.owner, 0, text.len() + STRING_BYTES);
                }
            }
            code.uses = Vec::new();
        }
    }

    /// Learns nothing more from now on, so that neither the symbolizer nor the profile's tables of strings and frames
    /// grow: lines that were not met before get only their function's name, functions that were not met before are
    /// `<unknown function>`. `false` undoes that.
    pub fn set_full(&mut self, full: bool) {
        self.full = full;
    }

    /// Frees what is not needed: line tables that no code object has any more, and room in tables that shrank.
    pub fn shrink(&mut self) {
        self.tables.sweep();
        self.codes.shrink_to_fit();
        self.frames.shrink_to_fit();
        self.images.shrink_to_fit();
        self.unnamed.shrink_to_fit();
    }

    /// How plausible the code objects of `image` have been so far.
    #[must_use]
    pub fn health(&self, image: u64) -> ImageHealth {
        self.images.get(&image).map(|image| image.health).unwrap_or_default()
    }

    /// Brings the pending frames of one code object up to date. `last`: nothing more will come.
    fn update_frames(&mut self, profile: &mut Profile, key: CodeKey, last: bool) {
        let Some(code) = self.codes.get_mut(&key) else { return };
        if last && let Some(table) = code.cut_table() {
            code.table = Table::Ready(self.tables.share(table));
        }
        let done = last || code.is_complete();
        if done {
            self.incomplete.remove(&key);
        }
        let mut uses = std::mem::take(&mut code.uses);
        for used in uses.iter_mut().filter(|used| used.pending) {
            let frame = code.frame(used.lasti, used.opcode, &mut profile.strings);
            profile.resolve(used.frame, frame);
            if code.is_named() {
                self.unnamed.remove(&used.frame);
            }
            used.pending = !done;
            if done && let Some(image) = self.images.get_mut(&key.image) {
                image.health.outside += u64::from(!code.covers(used.lasti));
            }
        }
        code.uses = uses;
    }
}

/// Begins a code object about which nothing is known.
fn unseen(image: &mut Image, stock: &mut Stock, incomplete: &mut BTreeSet<CodeKey>, key: CodeKey) -> Code {
    image.codes.push(key);
    image.hold(stock, CODE_BYTES);
    incomplete.insert(key);
    Code::unseen()
}

/// Takes a name, if it was not known yet.
fn learn(known: &mut Option<StrId>, profile: &mut Profile, image: &Image, stock: &mut Stock, name: &str) {
    if known.is_none() {
        let before = profile.strings.len();
        *known = Some(profile.strings.intern(name));
        // Names that the profile has already cost nothing more.
        if profile.strings.len() > before {
            stock.add(image.owner, 0, name.len() + STRING_BYTES);
        }
    }
}

/// Keeps a line table.
fn keep(tables: &mut LineTables, image: &mut Image, stock: &mut Stock, table: LineTable) -> Arc<LineTable> {
    image.hold(stock, table.size_bytes());
    image.health.bad_tables += u64::from(!table.is_sound());
    tables.share(table)
}

#[cfg(test)]
#[path = "symbolizer/tests.rs"]
mod tests;
