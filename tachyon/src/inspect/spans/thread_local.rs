//! Where each thread of a process has the variable `otel_thread_ctx_v1`.
//!
//! What proves it, by who defines it:
//!
//! - **The executable.** Its own code has the distance from the thread pointer built in ("local exec"), so that distance follows
//!   from the file alone: x86-64 puts the executable's block right below the thread pointer, arm64 16 bytes above it, both aligned
//!   as the segment is. No C library can do otherwise.
//! - **A library.** Its relocations name the words that the dynamic linker fills in for the library's own code: a distance from the
//!   thread pointer (`TPOFF64`), the module's number (`DTPMOD64`), or a descriptor (`TLSDESC`). The ABI defines that as a function
//!   and an argument, and leaves the argument to the function. glibc and musl have two such functions: one adds the
//!   argument to the thread pointer; the argument of the other points to {number of the module, distance in its block}. The
//!   argument shows which it is. On x86-64 static blocks are below the thread pointer, so a distance is negative, and no pointer to
//!   a process's memory is. On arm64 a distance below 64 KiB is not a pointer, because nothing can be mapped there
//!   (`vm.mmap_min_addr`), and anything else is believed only as a pointer. What a pointer leads to must have the very
//!   distance that the symbol has, else it is no such pair (a descriptor that is bound at first use points elsewhere until then).
//!
//! All words of one library must agree. A block without a fixed distance is found through the thread's vector, whose entries have
//! the size that the C library gives them; which library that is shows in what the dynamic linker exports.

use std::collections::BTreeSet;

use tachyon_common::walk::{Unreadable, UserMemory, read_u64};
use tachyon_common::whose::ThreadLocal;

use crate::remote::elf::{Elf, ElfError, Load, ReadAt, Slot, SlotKind, TlsSegment, TlsSymbol};

/// The variable: a pointer to the record of the span that the thread is in.
const VARIABLE: &str = "otel_thread_ctx_v1";

/// Largest number of a module that is believed: a process has a few hundred at most.
const MAX_MODULE: u64 = 1 << 16;

/// Longest distance from the thread pointer that is believed: a thread's static blocks are part of its stack.
const MAX_DISTANCE: i64 = 1 << 30;

/// Nothing can be mapped below this (`vm.mmap_min_addr`, as distributions set it).
const LOWEST_POINTER: u64 = 1 << 16;

/// Why it is unknown where a process's threads have the variable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoThreadLocal {
    /// No mapped file exports it.
    #[error("no mapped file exports {VARIABLE}")]
    NotDefined,
    /// Several do, each for itself.
    #[error("several files export {VARIABLE}")]
    Several,
    /// The library is being loaded, or binds at first use.
    #[error("the library with {VARIABLE} is not linked yet")]
    NotYet,
    /// It is loaded more than once, or its mappings do not show where.
    #[error("the mappings of the library with {VARIABLE} do not show where it was loaded")]
    NoLoadBias,
    /// The library has no words that show it.
    #[error("the library with {VARIABLE} has no relocation that tells where it is")]
    NoRelocation,
    /// The words contradict each other or cannot be.
    #[error("what the dynamic linker says of {VARIABLE} makes no sense: {0}")]
    Odd(&'static str),
    /// The thread's vector is needed, and the C library is neither glibc nor musl.
    #[error("{VARIABLE} lies in a block of its own, and the C library is not known")]
    UnknownLibc,
    /// The process says that its records are of another kind.
    #[error("its records are of the kind {0:?}")]
    Schema(String),
    /// A file could not be read.
    #[error("{0}")]
    File(String),
    /// Looking through its files would take too long.
    #[error("its files are too many or too large")]
    TooMuchToRead,
}

/// Where threads have their blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Arch {
    /// Below the thread pointer ("variant II").
    X86_64,
    /// Above it ("variant I").
    Arm64,
}

impl Arch {
    /// This machine's.
    pub(super) const HERE: Self = if cfg!(target_arch = "x86_64") { Self::X86_64 } else { Self::Arm64 };

    /// Whether a static block may lie at this distance.
    fn believes(self, segment: &TlsSegment, distance: i64) -> bool {
        let Ok(size) = i64::try_from(segment.mem_size) else { return false };
        match self {
            Self::X86_64 => distance > -MAX_DISTANCE && distance.checked_add(size).is_some_and(|end| end <= 0),
            Self::Arm64 => (16..MAX_DISTANCE).contains(&distance),
        }
    }
}

/// Whose dynamic linker it is: the dynamic linker makes the vectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Libc {
    Glibc,
    Musl,
}

impl Libc {
    /// Size of an entry of a thread's vector, and where the vector's address is, relative to the thread pointer.
    fn vector(self, arch: Arch) -> (u32, i64) {
        match (self, arch) {
            // `dtv_t` is a pair of pointers; `tcbhead_t.dtv` (glibc, sysdeps/x86_64/nptl/tls.h, sysdeps/aarch64/nptl/tls.h).
            (Self::Glibc, Arch::X86_64) => (16, 8),
            (Self::Glibc, Arch::Arm64) => (16, 0),
            // `struct pthread.dtv`: its second word, or its last, which ends at the thread pointer (musl, src/internal/pthread_impl.h).
            (Self::Musl, Arch::X86_64) => (8, 8),
            (Self::Musl, Arch::Arm64) => (8, -8),
        }
    }
}

/// What a file has to do with the variable.
#[derive(Debug, Default)]
pub(super) struct FileFacts {
    /// It defines it.
    pub(super) defined: Option<Defined>,
    /// It is a dynamic linker.
    pub(super) libc: Option<Libc>,
}

/// A file that defines the variable.
#[derive(Debug)]
pub(super) struct Defined {
    pub(super) symbol: TlsSymbol,
    /// Segments, to work out the load bias from mappings.
    pub(super) loads: Vec<Load>,
}

impl FileFacts {
    /// Reads them.
    ///
    /// # Errors
    /// When the file's tables make no sense.
    pub(super) fn of<R: ReadAt>(elf: &Elf<R>) -> Result<Self, ElfError> {
        if elf.machine() != super::super::locate::MACHINE {
            return Ok(Self::default());
        }
        let symbol = elf.thread_local(VARIABLE)?;
        Ok(Self { defined: symbol.map(|symbol| Defined { symbol, loads: elf.loads().to_vec() }), libc: libc(elf)? })
    }

    /// Whether nothing in it matters.
    pub(super) fn is_of_no_use(&self) -> bool {
        self.defined.is_none() && self.libc.is_none()
    }
}

/// Whose dynamic linker a file is. Only a dynamic linker defines the function that finds blocks; glibc's also exports its state;
/// musl's is the whole C library.
fn libc<R: ReadAt>(elf: &Elf<R>) -> Result<Option<Libc>, ElfError> {
    if elf.dynamic_symbol("__tls_get_addr")?.is_none() {
        return Ok(None);
    }
    if elf.dynamic_symbol("_rtld_global")?.is_some() {
        return Ok(Some(Libc::Glibc));
    }
    Ok(elf.dynamic_symbol("pthread_create")?.map(|_| Libc::Musl))
}

/// Where it is if the executable defines it.
pub(super) fn of_executable(symbol: &TlsSymbol, arch: Arch) -> ThreadLocal {
    let TlsSegment { vaddr, mem_size, align } = symbol.segment;
    let within = align - 1;
    let block = match arch {
        Arch::X86_64 => {
            0_u64.wrapping_sub(mem_size).wrapping_sub(0_u64.wrapping_sub(vaddr).wrapping_sub(mem_size) & within)
        }
        Arch::Arm64 => 16 + (vaddr.wrapping_sub(16) & within),
    };
    at(block.wrapping_add(symbol.offset).cast_signed())
}

/// Always the same distance from the thread pointer. The entry size only says that there is a place; it has no other use here.
fn at(offset: i64) -> ThreadLocal {
    ThreadLocal { offset, module: 0, entry_size: 16, vector_at: 0 }
}

/// Where it is if a library that was loaded with this bias defines it.
pub(super) fn of_library(
    symbol: &TlsSymbol,
    bias: u64,
    libc: Option<Libc>,
    arch: Arch,
    memory: &impl UserMemory,
) -> Result<ThreadLocal, NoThreadLocal> {
    let (mut distances, mut modules, mut not_yet) = (BTreeSet::new(), BTreeSet::new(), false);
    for slot in &symbol.slots {
        match told(slot, bias, &symbol.segment, arch, memory)? {
            Told::Distance(distance) => _ = distances.insert(distance),
            Told::Module(module) => _ = modules.insert(module),
            Told::NotYet => not_yet = true,
        }
    }
    if distances.len() > 1 || modules.len() > 1 {
        return Err(NoThreadLocal::Odd("its words contradict each other"));
    }
    let offset = i64::try_from(symbol.offset).map_err(|_| NoThreadLocal::Odd("its offset"))?;
    match (distances.first(), modules.first()) {
        (Some(distance), _) => Ok(at(distance + offset)),
        // The other words may still say that the block has a fixed distance: then its entry in a vector may stay empty.
        (None, _) if not_yet => Err(NoThreadLocal::NotYet),
        (None, Some(&module)) => {
            let (entry_size, vector_at) = libc.ok_or(NoThreadLocal::UnknownLibc)?.vector(arch);
            Ok(ThreadLocal { offset, module, entry_size, vector_at })
        }
        (None, None) => Err(NoThreadLocal::NoRelocation),
    }
}

/// What one slot says about the module's block.
enum Told {
    /// Its distance from the thread pointer.
    Distance(i64),
    /// Its number.
    Module(u32),
    /// Nothing yet.
    NotYet,
}

fn told(
    slot: &Slot,
    bias: u64,
    segment: &TlsSegment,
    arch: Arch,
    memory: &impl UserMemory,
) -> Result<Told, NoThreadLocal> {
    let at = bias.wrapping_add(slot.vaddr);
    let unreadable = |_| NoThreadLocal::Odd("a word is not mapped");
    let distance = |value: u64| {
        let distance = value.cast_signed().wrapping_sub(slot.within.cast_signed());
        arch.believes(segment, distance).then_some(Told::Distance(distance))
    };
    match slot.kind {
        SlotKind::Module => match read_u64(memory, at, 0).map_err(unreadable)? {
            0 => Ok(Told::NotYet),
            module => number(module),
        },
        SlotKind::Offset => match read_u64(memory, at, 0).map_err(unreadable)? {
            0 => Ok(Told::NotYet),
            value => distance(value).ok_or(NoThreadLocal::Odd("its distance from the thread pointer")),
        },
        SlotKind::Descriptor => {
            let [function, argument] = pair(memory, at).map_err(unreadable)?;
            let is_pointer = match arch {
                Arch::X86_64 => argument.cast_signed() >= 0,
                Arch::Arm64 => argument >= LOWEST_POINTER,
            };
            if function == 0 || argument == 0 {
                return Ok(Told::NotYet);
            }
            if !is_pointer {
                return distance(argument).ok_or(NoThreadLocal::Odd("its descriptor's distance"));
            }
            let [module, within] = pair(memory, argument).map_err(|_| NoThreadLocal::Odd("its descriptor"))?;
            if within != slot.within {
                return Ok(Told::NotYet);
            }
            number(module)
        }
    }
}

fn number(module: u64) -> Result<Told, NoThreadLocal> {
    let module = Some(module).filter(|module| (1..=MAX_MODULE).contains(module));
    let module = module.and_then(|module| u32::try_from(module).ok());
    module.map(Told::Module).ok_or(NoThreadLocal::Odd("its module's number"))
}

/// Two words.
fn pair(memory: &impl UserMemory, at: u64) -> Result<[u64; 2], Unreadable> {
    Ok([read_u64(memory, at, 0)?, read_u64(memory, at, 8)?])
}
