//! The greenlet that a thread runs, and its parents, where control returns to.
//!
//! The package greenlet keeps a `ThreadState` for each thread that has used it; a variable of the thread's own leads there. What its
//! classes have in common is in [`Greenlets`]; where the parent is differs between versions, and follows from where the main greenlet
//! is, whose address is known. In steps, as [`super::Awaiting`] is.

use super::buffer::Buffer;
use super::frames::FrameWalk;
use super::memory::{Unreadable, UserMemory, read_u64, read_words};
use super::task::TaskReader;
use crate::layout::Layout;
use crate::opaque;
use crate::whose::{Greenlets, MAX_GREENLETS, NAME_BYTES, Task, flags};

/// Most entries of a greenlet's dictionary that are looked at for its name.
pub const MAX_NAME_LOOKS: u64 = 16;

/// From `StackState` to `PythonState._top_frame` (`src/greenlet/TGreenlet.hpp`): the stack's start, stop, copy, size and predecessor;
/// then the context.
pub const TOP_FRAME: u32 = 48;

/// `StackState.stack_stop` of a thread's main greenlet.
pub const WHOLE_STACK: u64 = u64::MAX;

/// Room for a greenlet's state, up to its parent.
const STATE: u32 = 256;
/// Words after the frame that are searched for the main greenlet: it is the fourteenth in free-threaded 3.14 and 3.15, where most are before
/// it. The parent is two words after it.
const SEARCHED: u32 = 14;

/// What no page is smaller than.
const PAGE: u64 = 4096;

/// Largest table of a dictionary that is looked at: one byte an index.
const MAX_INDEX_BYTES: u64 = 0xff;

/// The key that a name has, as a word of its text.
const NAME: u32 = u32::from_le_bytes(*b"name");

/// Where the search stands.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GreenletWalk {
    /// The running one, its parent, and so on.
    pub greenlets: [Task; MAX_GREENLETS],
    /// How many there are.
    pub found: u32,
    /// 1: the last one may have a parent that is not here.
    pub more: u32,
    /// The thread's main greenlet.
    main: u64,
    /// The running one's parent.
    first_parent: u64,
    /// The one to look at next; 0: none.
    next: u64,
    /// The frame in which the one that was found last is suspended; 0: none.
    frame: u64,
    /// Its dictionary and its type.
    dict: u64,
    kind: u64,
    /// The entry of that dictionary to look at next, how many are left, and bytes of each.
    entry: u64,
    left: u64,
    entry_bytes: u64,
    /// Where its values are, if they are not in the entries; 0: they are.
    value: u64,
    /// The object that the name is, and the type of strings; 0: none.
    name: u64,
    text_type: u64,
    /// Frames stored before its own.
    before: u32,
    /// Explicit padding.
    pub _pad: u32,
    /// A greenlet's state.
    state: Buffer<{ STATE as usize }, { STATE as usize / 8 }>,
}

impl GreenletWalk {
    /// Nothing yet.
    #[must_use]
    pub fn none() -> Self {
        Self {
            greenlets: [Task::NONE; MAX_GREENLETS],
            found: 0,
            more: 0,
            main: 0,
            first_parent: 0,
            next: 0,
            frame: 0,
            dict: 0,
            kind: 0,
            entry: 0,
            left: 0,
            entry_bytes: 0,
            value: 0,
            name: 0,
            text_type: 0,
            before: 0,
            _pad: 0,
            state: Buffer::default(),
        }
    }

    /// Begins with the thread whose own variable this is (0: it has none). False: it runs its main greenlet, or knows none.
    #[inline(always)]
    pub fn begin<M: UserMemory + ?Sized>(&mut self, memory: &M, variable: u64) -> bool {
        (self.found, self.more, self.next) = (0, 0, 0);
        let [main, current] = main_and_current(memory, variable);
        if main == 0 || current == main {
            return false;
        }
        (self.main, self.next) = (main, current);
        current != 0
    }

    /// Goes back to the running greenlet: its parents are looked at next, also if they were before.
    #[inline(always)]
    pub fn begin_parents(&mut self) {
        (self.found, self.more, self.next) = (1, 0, self.first_parent);
    }

    /// Looks at the next greenlet and takes it down, but for its name. False: there is none, or what is there is none.
    #[inline(always)]
    pub fn look<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        place: &Greenlets,
        reader: &mut TaskReader,
    ) -> bool {
        let address = core::mem::take(&mut self.next);
        (self.frame, self.left, self.name) = (0, 0, 0);
        if address == 0 {
            return false;
        }
        let at = self.found as usize;
        // Until it is known.
        self.more = u32::from(at > 0);
        if at >= MAX_GREENLETS || reader.head.fill(memory, address, place.implementation.wrapping_add(8)).is_err() {
            return false;
        }
        (self.dict, self.kind) = (reader.head.u64(place.dict), reader.head.u64(layout.ob_type));
        let implementation = reader.head.u64(place.implementation);
        if !self.read_state(memory, implementation) {
            return false;
        }
        let stack = place.stack_state.wrapping_sub(self.without_self(address));
        // Here, where the verifier has not yet followed any branch of what comes.
        let parent = self.parent(stack.wrapping_add(TOP_FRAME));
        let (start, stop) = (self.state.u64(stack), self.state.u64(stack.wrapping_add(8)));
        let frame = self.state.u64(stack.wrapping_add(TOP_FRAME));
        let is_main = address == self.main;
        // The one that runs has no frame set aside: with one, the thread is just going from one greenlet to another. One that has
        // ended has no start, and one that has not begun has no stop.
        let begun = stop != 0 && (start != 0 || is_main);
        if at == 0 && (frame != 0 || !begun) || is_main != (stop == WHOLE_STACK) {
            return false;
        }
        if !is_main {
            let Some(parent) = parent else { return false };
            self.next = parent;
        }
        if at == 0 {
            self.first_parent = self.next;
        }
        if begun && frame != 0 {
            self.frame =
                if place.frame_interp == 0 { frame } else { read_u64(memory, frame, place.frame_interp).unwrap_or(0) };
        }
        let flags = if is_main {
            flags::MAIN
        } else if frame != 0 && self.frame == 0 {
            flags::OUTER_CUT
        } else {
            0
        };
        // Read again: a verifier forgets what it knew of a number that was put aside.
        let at = opaque::word(u64::from(self.found)) as usize & (MAX_GREENLETS - 1);
        self.greenlets[at] = Task { address, flags, ..Task::NONE };
        self.found += 1;
        self.more = 0;
        true
    }

    /// Whether the thread whose own variable this is goes from one greenlet to another: the one that it calls current has a frame set aside.
    /// Changes nothing of what was found.
    #[inline(always)]
    pub fn is_switching<M: UserMemory + ?Sized>(&mut self, memory: &M, place: &Greenlets, variable: u64) -> bool {
        let [_, current] = main_and_current(memory, variable);
        let implementation =
            if current == 0 { 0 } else { read_u64(memory, current, place.implementation).unwrap_or(0) };
        if !self.read_state(memory, implementation) {
            return false;
        }
        let without_self = self.without_self(current);
        self.state.u64(place.stack_state.wrapping_sub(without_self).wrapping_add(TOP_FRAME)) != 0
    }

    /// By how much the fields lie lower where the state does not name its greenlet: 8, or 0 where it does. (No branch, likewise.)
    #[inline(always)]
    fn without_self(&self, greenlet: u64) -> u32 {
        (opaque::differ(self.state.u64(8), greenlet) * 8) as u32
    }

    /// It may be the last thing before memory that is not there.
    #[inline(always)]
    fn read_state<M: UserMemory + ?Sized>(&mut self, memory: &M, implementation: u64) -> bool {
        if implementation == 0 {
            return false;
        }
        if self.state.fill(memory, implementation, STATE).is_ok() {
            return true;
        }
        let to_end = (PAGE - (implementation & (PAGE - 1))).min(u64::from(STATE)) as u32;
        // What is left of another one there must not be taken for this one's.
        self.state = Buffer::default();
        self.state.fill(memory, implementation, to_end).is_ok()
    }

    /// The parent: the greenlet's function is between it and the main greenlet, which follows the Python state.
    #[inline(always)]
    fn parent(&self, top: u32) -> Option<u64> {
        // The first of the words that is it, or 0: no branch, for the verifier would follow each.
        let mut found = 0;
        let mut word = SEARCHED;
        while word > 0 {
            let differs = opaque::differ(self.state.u64(top.wrapping_add(8 * word)), self.main);
            found = found * differs + u64::from(word) * (1 - differs);
            word -= 1;
        }
        let parent = top.wrapping_add(8 * found as u32).wrapping_add(16);
        if found == 0 { None } else { Some(self.state.u64(parent)) }
    }

    /// Begins to look for the name of the greenlet that was found last: in how many entries of its dictionary.
    #[inline(always)]
    pub fn begin_name<M: UserMemory + ?Sized>(&mut self, memory: &M, place: &Greenlets) -> u64 {
        let dict = self.dict;
        if place.dict_used == 0 || dict == 0 {
            return 0;
        }
        // `ma_used`, `ma_version_tag`, `ma_keys` and `ma_values`.
        let mut words = [0_u64; 4];
        if !read_words(memory, dict.wrapping_add(u64::from(place.dict_used)), &mut words) || words[0] == 0 {
            return 0;
        }
        let [_, _, keys, values] = words;
        // From `dk_refcnt` to `dk_nentries`.
        let mut words = [0_u64; 5];
        if !read_words(memory, keys, &mut words) {
            return 0;
        }
        // `dk_size`, a word (up to 3.10; each index has a byte), or `dk_log2_index_bytes`, the second byte of it, and `dk_kind`, the third:
        // entries of a general table begin with a hash.
        let (index_bytes, entries, hashed) = if place.keys_nentries == 32 {
            (words[1], words[4], true)
        } else {
            (1 << ((words[1] >> 8) & 63), words[3] & 0xffff_ffff, words[1] >> 16 & 0xff == 0)
        };
        if index_bytes > MAX_INDEX_BYTES || entries > MAX_INDEX_BYTES {
            return 0;
        }
        self.entry_bytes = if hashed { 24 } else { 16 };
        let first = keys.wrapping_add(u64::from(place.keys_indices)).wrapping_add(index_bytes);
        // To the key.
        self.entry = first.wrapping_add(self.entry_bytes - 16);
        self.value = if values == 0 { 0 } else { values.wrapping_add(u64::from(place.values_start)) };
        self.left = entries.min(MAX_NAME_LOOKS);
        self.left
    }

    /// Looks at one of them. False: there are no more, or it was the one.
    #[inline(always)]
    pub fn look_at_name<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        reader: &mut TaskReader,
    ) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        let (entry, value) = (self.entry, self.value);
        self.entry = entry.wrapping_add(self.entry_bytes);
        self.value = if value == 0 { 0 } else { value.wrapping_add(8) };
        let mut words = [0; 2];
        if !read_words(memory, entry, &mut words) {
            return true;
        }
        let [key, in_entry] = words;
        // An entry that was taken out has no key.
        if key == 0 || reader.head.fill(memory, key, layout.unicode_ascii_size.wrapping_add(4)).is_err() {
            return true;
        }
        if reader.head.u64(layout.unicode_length) != 4 || reader.head.u32(layout.unicode_ascii_size) != NAME {
            return true;
        }
        self.name = if value == 0 { in_entry } else { read_u64(memory, value, 0).unwrap_or(0) };
        self.text_type = reader.head.u64(layout.ob_type);
        self.left = 0;
        false
    }

    /// Takes down the name: the greenlet's own, or that of its type.
    #[inline(always)]
    pub fn take_name<M: UserMemory + ?Sized>(
        &mut self,
        memory: &M,
        layout: &Layout,
        place: &Greenlets,
        reader: &mut TaskReader,
    ) {
        let last = (self.found as usize).wrapping_sub(1);
        if last >= MAX_GREENLETS {
            return;
        }
        let (name, kind, text_type) = (self.name, self.kind, self.text_type);
        let task = &mut self.greenlets[last & (MAX_GREENLETS - 1)];
        if task.flags & flags::MAIN != 0 {
            return;
        }
        if name != 0 && reader.take_text(memory, layout, text_type, name, task).is_ok() {
            return;
        }
        if take_type_name(memory, place, kind, task).is_err() {
            task.flags |= flags::NAME_UNREADABLE;
        }
    }

    /// Puts a walk at the frame in which the greenlet that was found last is suspended. False: there is none.
    #[inline(always)]
    pub fn go_on(&mut self, walk: &mut FrameWalk) -> bool {
        self.before = walk.stored;
        if self.frame == 0 || self.found < 2 {
            return false;
        }
        let tasks = walk.tasks;
        walk.go_on_at(self.frame);
        walk.tasks = tasks;
        true
    }

    /// Notes how many frames of it there are, now that the record has so many, and whether the last one is among them.
    #[inline(always)]
    pub fn walked(&mut self, stored: u32, whole: bool) {
        let last = (self.found as usize).wrapping_sub(1);
        if last < MAX_GREENLETS {
            let task = &mut self.greenlets[last & (MAX_GREENLETS - 1)];
            task.frames = stored.wrapping_sub(self.before) as u16;
            if !whole {
                task.flags |= flags::OUTER_CUT;
            }
        }
    }
}

/// The main and the current greenlet of the thread whose own variable this is; 0: it has none.
#[inline(always)]
fn main_and_current<M: UserMemory + ?Sized>(memory: &M, variable: u64) -> [u64; 2] {
    let state = if variable == 0 { 0 } else { read_u64(memory, variable, 0).unwrap_or(0) };
    // 1: it has not been asked for (`ThreadStateCreator`).
    let mut words = [0; 2];
    if state <= 1 || !read_words(memory, state, &mut words) {
        return [0; 2];
    }
    words
}

/// `tp_name` ends with a 0, and nothing need lie behind it.
#[inline(always)]
fn take_type_name<M: UserMemory + ?Sized>(
    memory: &M,
    place: &Greenlets,
    kind: u64,
    task: &mut Task,
) -> Result<(), Unreadable> {
    let name = read_u64(memory, kind, place.type_name)?;
    task.flags |= flags::TYPE_NAME;
    task.name_kind = 1;
    if memory.read(name, &mut task.name).is_ok() {
        task.name_bytes = NAME_BYTES as u8;
        return Ok(());
    }
    let to_end = (PAGE - (name & (PAGE - 1))).min(NAME_BYTES as u64 - 1) as usize & (NAME_BYTES - 1);
    let Some(into) = task.name.get_mut(..to_end) else { return Err(Unreadable) };
    memory.read(name, into)?;
    task.name_bytes = to_end as u8;
    Ok(())
}

const _: () = assert!(core::mem::size_of::<GreenletWalk>() == MAX_GREENLETS * 88 + 8 + 12 * 8 + 8 + STATE as usize);
