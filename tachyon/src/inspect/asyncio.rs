//! Where asyncio keeps its tasks: the section `.AsyncioDebug`, which CPython publishes from 3.14 on.
//!
//! Takes a mapped file and the interpreter that it belongs to, and gives validated [`AsyncioOffsets`]. The section is in the
//! extension module `_asyncio` (3.14) or, where that is built in, in the executable or libpython (3.15): no name is relied on.
//! It has no version and no cookie, so its numbers are compared with each other and with what the interpreter says about itself.

use super::awaits::{AwaitLayout, CoroutineLayout, StackTop};
use super::budget::{Metered, ReadBudget};
use super::locate::{ElfCache, MACHINE, MAX_FILES};
use super::validate::{Field, MAX_TSTATE, group};
use super::{Interpreter, candidates};
use crate::remote::elf::{Elf, ElfError, ReadAt, Section};
use crate::remote::{MappedFile, Mapping, RemoteProcess};
use std::io;
use std::path::Path;
use tachyon_common::whose::Asyncio;

/// Words of the section: `Py_AsyncioModuleDebugOffsets` of `Modules/_asynciomodule.c`, the same in v3.14.0 and v3.15.0.
pub(super) type Words = [u64; 13];

/// Its name.
const SECTION: &str = ".AsyncioDebug";

/// Largest size of a task that is believed (168 bytes in 3.14 and 3.15, free-threaded 192).
const MAX_TASK: u64 = 1024;

/// The first version that publishes it.
const SINCE: (u8, u8) = (3, 14);

/// Where asyncio keeps its tasks, in bytes from the start of the structure named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AsyncioOffsets {
    /// `TaskObj.task_name`: a `str`, or an `int` N for `Task-N`.
    pub task_name: u64,
    /// `TaskObj.task_awaited_by`: the task that awaits this one, or a set of them; futures that are not tasks have it too.
    pub task_awaited_by: u64,
    /// `TaskObj.task_is_task`, one byte: not 0 in tasks, 0 in other futures.
    pub task_is_task: u64,
    /// `TaskObj.task_awaited_by_is_set`, one byte.
    pub task_awaited_by_is_set: u64,
    /// `TaskObj.task_coro`.
    pub task_coro: u64,
    /// `TaskObj.task_node`: a `struct llist_node` of one of the two lists below.
    pub task_node: u64,
    /// `PyInterpreterState.asyncio_tasks_head`: a `struct llist_node`, head of the list of tasks whose threads have ended.
    pub interp_tasks_head: u64,
    /// `_PyThreadStateImpl.asyncio_running_loop`; the structure starts with the `PyThreadState`.
    pub thread_running_loop: u64,
    /// `_PyThreadStateImpl.asyncio_running_task`.
    pub thread_running_task: u64,
    /// `_PyThreadStateImpl.asyncio_tasks_head`: a `struct llist_node`, head of the list of tasks made in that thread.
    pub thread_tasks_head: u64,
}

impl AsyncioOffsets {
    /// What a section says, if it makes sense for an interpreter.
    fn validated(words: Words, interpreter: &Interpreter) -> Option<Self> {
        let [task_size, name, awaited_by, is_task, by_is_set, coro, node, rest @ ..] = words;
        let [interp_size, interp_head, thread_size, running_loop, running_task, thread_head] = rest;
        // Another version's structures would have other sizes.
        let sizes = (size_of::<u64>() as u64..=MAX_TASK).contains(&task_size)
            && interp_size == interpreter.interp_size
            && (interpreter.tstate_size..=MAX_TSTATE).contains(&thread_size);
        // An object starts with its header, whose last word is the type.
        let header = u64::from(interpreter.layout.ob_type).checked_add(8)?;
        let task = [
            (name, 8),
            (awaited_by, 8),
            (is_task, 1),
            (by_is_set, 1),
            (coro, 8),
            // A node's two words.
            (node, 8),
            (node.checked_add(8)?, 8),
        ];
        let interp = [(interp_head, 8), (interp_head.checked_add(8)?, 8)];
        let thread = [(running_loop, 8), (running_task, 8), (thread_head, 8), (thread_head.checked_add(8)?, 8)];
        // What `_PyThreadStateImpl` adds follows the `PyThreadState`.
        let fit = fit(&task, header..task_size)
            && fit(&interp, 0..interp_size)
            && fit(&thread, interpreter.tstate_size..thread_size);
        (sizes && fit).then_some(Self {
            task_name: name,
            task_awaited_by: awaited_by,
            task_is_task: is_task,
            task_awaited_by_is_set: by_is_set,
            task_coro: coro,
            task_node: node,
            interp_tasks_head: interp_head,
            thread_running_loop: running_loop,
            thread_running_task: running_task,
            thread_tasks_head: thread_head,
        })
    }
}

impl AsyncioOffsets {
    /// The part that the kernel side reads; `None`: a number is too large for it.
    #[must_use]
    pub fn for_kernel(&self, awaits: &AwaitLayout) -> Option<Asyncio> {
        let word = |offset: u64| u32::try_from(offset).ok();
        // Whatever has `.AsyncioDebug` has these too.
        let CoroutineLayout::Embedded { frame, state, states, top: StackTop::Pointer { at, below } } = awaits.coroutine
        else {
            return None;
        };
        Some(Asyncio {
            thread_running_task: word(self.thread_running_task)?,
            // Everything that is read is before the end of the last of these.
            task_size: word(self.task_node.max(self.task_name).max(self.task_coro))? + 8,
            future_size: word(self.task_awaited_by.max(self.task_is_task).max(self.task_awaited_by_is_set))? + 1,
            task_name: word(self.task_name)?,
            task_coro: word(self.task_coro)?,
            task_is_task: word(self.task_is_task)?,
            task_awaited_by: word(self.task_awaited_by)?,
            task_awaited_by_is_set: word(self.task_awaited_by_is_set)?,
            coro_frame: word(frame)?,
            coro_state: word(state)?,
            coro_awaits: [states.awaits, states.awaits_locked.unwrap_or(states.awaits)],
            coro_executing: states.executing,
            awaited_below: u8::try_from(below * 8).ok()?,
            frame_stackpointer: word(at)?,
            set_table: word(awaits.set_table)?,
            set_mask: word(awaits.set_mask)?,
            type_flags: word(awaits.type_flags)?,
            // The field after `tp_name` in every version.
            type_basicsize: word(awaits.type_name)? + 8,
            long_tag: word(awaits.long_tag)?,
            long_digits: word(awaits.long_digit)?,
            ..Asyncio::default()
        })
    }
}

/// Whether fields (offset and width) are aligned, do not overlap, and are within a part of their structure.
fn fit(fields: &[(u64, u64)], within: std::ops::Range<u64>) -> bool {
    let field = |&(offset, width): &(u64, u64)| {
        let offset = u32::try_from(offset).ok().filter(|&offset| u64::from(offset) >= within.start)?;
        Some((SECTION, offset, width, true))
    };
    let fields: Option<Vec<Field>> = fields.iter().map(field).collect();
    fields.is_some_and(|fields| group(&fields, within.end).is_ok())
}

/// The section's words in a file; `None` if it has no such section.
fn words<R: ReadAt>(source: R) -> Result<Option<Words>, ElfError> {
    let elf = Elf::parse(source)?;
    let mut bytes = [0; size_of::<Words>()];
    let whole = |section: &&Section| section.size >= bytes.len() as u64 && elf.machine() == MACHINE;
    let Some(section) = elf.section(SECTION).filter(whole) else { return Ok(None) };
    elf.read_vaddr(section.vaddr, &mut bytes)?;
    let mut words = Words::default();
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    Ok(Some(words))
}

impl ElfCache {
    /// What one file that a process maps says about asyncio's tasks: `None` if it says nothing that fits the interpreter.
    /// Each file is read once, however many processes map it.
    pub fn asyncio_of(&mut self, file: &MappedFile, interpreter: &Interpreter) -> Option<AsyncioOffsets> {
        self.asyncio_within(file, interpreter, &ReadBudget::new())
    }

    fn asyncio_within(
        &mut self,
        file: &MappedFile,
        interpreter: &Interpreter,
        budget: &ReadBudget,
    ) -> Option<AsyncioOffsets> {
        let known = self.asyncio.get(&file.identity()).copied();
        let words = match known {
            Some(words) => words,
            None => {
                let source = file.open().ok()?;
                self.parsed += 1;
                let words = match words(Metered { source, budget }) {
                    Ok(words) => words,
                    // What could not be read this time may be readable another time.
                    Err(ElfError::Read { source, .. }) if source.kind() == io::ErrorKind::TimedOut => return None,
                    Err(_) if budget.is_spent() => return None,
                    Err(_) => None,
                };
                if self.asyncio.len() >= MAX_FILES {
                    self.asyncio.clear();
                }
                self.asyncio.insert(file.identity(), words);
                words
            }
        };
        AsyncioOffsets::validated(words?, interpreter)
    }
}

/// Where the tasks of a process are. `None` if it publishes nothing: it is older than 3.14, or is 3.14 and has not imported
/// `asyncio` (so far).
pub fn asyncio_offsets(
    process: &RemoteProcess,
    interpreter: &Interpreter,
    cache: &mut ElfCache,
) -> Option<AsyncioOffsets> {
    if interpreter.layout.minor_version() < SINCE {
        return None;
    }
    let maps = process.maps().ok()?;
    let budget = ReadBudget::new();
    let mut files = candidates(&maps, None);
    files.sort_by_key(|mappings| mappings.first().map_or(u8::MAX, |first| place(first, interpreter)));
    files.iter().filter_map(|mappings| mappings.first()).find_map(|first| {
        let file = process.mapped_file(first).ok()?;
        cache.asyncio_within(&file, interpreter, &budget)
    })
}

/// Whether a file is named like the module: `_asyncio.cpython-314-….so`.
#[must_use]
pub fn is_named_asyncio(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"_asyncio."))
}

/// Whether a process has mapped the module.
#[must_use]
pub fn has_asyncio(maps: &[Mapping]) -> bool {
    maps.iter().filter_map(Mapping::file_path).any(is_named_asyncio)
}

/// Where to look first: in the interpreter's own file, then in files that are named like the module.
fn place(mapping: &Mapping, interpreter: &Interpreter) -> u8 {
    let path = mapping.file_path();
    let named = || path.is_some_and(is_named_asyncio);
    match mapping.inode == interpreter.file.inode && path == Some(interpreter.path.as_path()) {
        true => 0,
        false if named() => 1,
        false => 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `_asyncio` of CPython 3.14.10 says, for an interpreter that says the same about itself.
    const GOOD: Words = [168, 136, 96, 108, 109, 128, 152, 225_864, 10_880, 936, 864, 872, 880];

    fn interpreter() -> Interpreter {
        let layout = tachyon_common::layout::Layout { ob_type: 8, version_hex: 0x030e_0af0, ..Default::default() };
        Interpreter {
            runtime: 0,
            code_type: 0,
            none: 0,
            layout,
            interp_size: 225_864,
            tstate_size: 832,
            asyncio_built_in: false,
            awaits: None,
            collector: None,
            entering: None,
            entering_error: None,
            file: crate::remote::FileIdentity { dev: 0, inode: 0, mtime_ns: 0, size: 0 },
            path: std::path::PathBuf::new(),
            static_address: false,
            load_bias: 0,
            known_build: true,
        }
    }

    #[test]
    fn words_have_their_places() {
        let offsets = AsyncioOffsets::validated(GOOD, &interpreter()).expect("as a real one has them");
        let AsyncioOffsets {
            task_name,
            task_awaited_by,
            task_is_task,
            task_awaited_by_is_set,
            task_coro,
            task_node,
            interp_tasks_head,
            thread_running_loop,
            thread_running_task,
            thread_tasks_head,
        } = offsets;
        assert_eq!((task_name, task_awaited_by, task_is_task, task_awaited_by_is_set), (136, 96, 108, 109));
        assert_eq!((task_coro, task_node, interp_tasks_head), (128, 152, 10_880));
        assert_eq!((thread_running_loop, thread_running_task, thread_tasks_head), (864, 872, 880));
    }

    #[test]
    fn words_that_do_not_fit_are_refused() {
        for (at, bad) in [
            (0, 0),
            (0, 1 << 20),  // no size of a task
            (0, 160),      // the node ends outside
            (1, 137),      // not aligned
            (1, 8),        // in the object's header
            (1, 96),       // over another field
            (1, u64::MAX), // wraps
            (3, 96),       // over another field
            (6, u64::MAX - 7),
            (7, 225_872), // the interpreter states another size
            (8, 225_856), // the head's second word is outside
            (8, u64::MAX),
            (9, 824), // smaller than the thread state that it starts with
            (9, 1 << 20),
            (10, 824), // in the thread state that it starts with
            (11, 864), // over another field
            (12, 932), // not aligned
            (12, 928), // its second word is outside
        ] {
            let mut words = GOOD;
            words[at] = bad;
            assert_eq!(AsyncioOffsets::validated(words, &interpreter()), None, "word {at} is {bad}");
        }
    }

    #[test]
    fn what_is_no_such_file_says_nothing() {
        assert!(words(&b"no ELF file"[..]).is_err());
        let own = std::fs::File::open("/proc/self/exe").expect("this program");
        assert!(words(own).expect("an ELF file").is_none());
    }
}
