//! Programs for the one interpreter build that a recording begins with.
//!
//! The verifier is most of what a start costs, and most of what it looks at is what other versions of CPython need. So where the builds
//! of all processes are known, the programs are made for theirs: its layout is a constant to the verifier, which leaves out the rest,
//! and so it does what reads greenlets and tasks where there are none. Once anything else is met, the same programs are loaded a second
//! time, made for everything, before the first entry says so: the first program goes on to theirs from then on, and what is attached and
//! counted stays as it is.

use super::Kernel;
use super::diagnostics::object_or;
use super::error::{KernelError, program_error};
use super::loader::loader;
use super::object::{OBJECT, map_fd, take};
use super::pod::Pod;
use super::privileges::drop_privileges_but_sampling;
use super::programs::{ENTRY, STAGES, load_side_by_side, perf_program};
use super::rows::put_in_place;
use crate::remote::open_files;
use aya::Ebpf;
use aya::maps::{Map, MapData, ProgramArray};
use aya::programs::{Program, ProgramInfo};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{SysconfVar, sysconf};
use std::io;
use std::os::fd::RawFd;
use std::panic::resume_unwind;
use std::sync::mpsc;
use std::thread::{Builder, JoinHandle};
use tachyon_common::config::{Config, flags};
use tachyon_common::layout::Layout;

/// What all processes that a recording begins with have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MadeFor {
    /// Their layout.
    pub layout: Layout,
    /// Some may have greenlets.
    pub greenlets: bool,
    /// Some may have running tasks of asyncio.
    pub tasks: bool,
}

impl MadeFor {
    /// As flags of [`Config`].
    pub(super) const fn flags(&self) -> u32 {
        let without_greenlets = if self.greenlets { 0 } else { flags::NO_GREENLETS };
        let without_tasks = if self.tasks { 0 } else { flags::NO_TASKS };
        flags::ONE_LAYOUT | without_greenlets | without_tasks
    }
}

/// What is loaded, as far as it is not made for everything.
pub(super) struct Narrow {
    made_for: MadeFor,
    /// What loads the rest; `None`: it has tried to.
    rest: Option<Rest>,
}

impl Narrow {
    /// Prepares to load the rest, with the configuration and the maps of what is loaded.
    pub(super) fn of(
        made_for: MadeFor,
        config: Config,
        ebpf: &Ebpf,
        programs: Vec<&'static str>,
    ) -> Result<Self, KernelError> {
        Ok(Self { made_for, rest: Some(Rest::prepare(config, ebpf, programs)?) })
    }
}

/// A thread that has the right to load programs, and waits until it is to. It has a table of open files of its own, in which the maps
/// stay open: the process itself needs no more open files.
struct Rest {
    /// Dropping it ends the thread.
    go: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<Option<Result<Loaded, KernelError>>>>,
}

/// What the kernel says of each program.
pub(super) type Loaded = Vec<(String, ProgramInfo)>;

impl Rest {
    fn prepare(config: Config, ebpf: &Ebpf, programs: Vec<&'static str>) -> Result<Self, KernelError> {
        // Each has constants of its own.
        let maps = ebpf.maps().filter(|(name, _)| !name.starts_with('.'));
        let maps: Vec<_> = maps.map(|(name, map)| Shared::of(name, map)).collect::<Result<_, _>>()?;
        let (go, told) = mpsc::channel();
        let thread = Builder::new().name("tachyon-rest".to_owned()).spawn(move || {
            // If the kernel refuses, it shares the process's, in which the maps are open as well.
            let own = keep_only(maps.iter().map(|map| map.fd)).is_ok();
            // If the kernel refuses, it keeps more rights than it needs.
            let _refused = drop_privileges_but_sampling();
            let loaded = told.recv().ok().map(|()| load(config, &maps, &programs));
            if own {
                // Now, for whoever waits for a thread does not wait for its files.
                // SAFETY: the table is this thread's own, which uses none of them any more.
                let _last = unsafe { open_files::close_all_but(&[]) };
            }
            loaded
        });
        Ok(Self { go: Some(go), thread: Some(thread.map_err(KernelError::Thread)?) })
    }

    fn load(mut self) -> Result<Loaded, KernelError> {
        if let Some(go) = &self.go {
            // If it has panicked, that is seen below.
            let _ended = go.send(());
        }
        let ended = self.thread.take().map(JoinHandle::join);
        let loaded = ended.and_then(|ended| ended.unwrap_or_else(|panic| resume_unwind(panic)));
        loaded.unwrap_or(Err(KernelError::Narrow))
    }
}

impl Drop for Rest {
    fn drop(&mut self) {
        drop(self.go.take());
        // Its panic is on standard error.
        let _panicked = self.thread.take().map(JoinHandle::join);
    }
}

/// Gives the calling thread a table of open files of its own, with these files and the standard ones.
fn keep_only(files: impl Iterator<Item = RawFd>) -> io::Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    let mut kept: Vec<RawFd> = files.chain(0..3).collect();
    kept.sort_unstable();
    // SAFETY: the table is this thread's own, which uses no others.
    unsafe { open_files::close_all_but(&kept) }
}

/// Programs that a table of them has room for, or fewer.
const PLACES: u32 = STAGES.len() as u32;

/// A map that both use.
struct Shared {
    name: String,
    fd: RawFd,
    /// How many entries the one has that is made to be replaced: the fewest that there may be.
    entries: u32,
}

impl Shared {
    fn of(name: &str, map: &Map) -> Result<Self, KernelError> {
        let page = || sysconf(SysconfVar::PAGE_SIZE).ok().flatten().and_then(|bytes| u32::try_from(bytes).ok());
        let entries = match map {
            Map::RingBuf(_) => page().unwrap_or(1 << 16),
            // The library goes by it.
            Map::ProgramArray(_) => PLACES,
            _ => 1,
        };
        Ok(Self { name: name.to_owned(), fd: map_fd(map).ok_or(KernelError::Missing(KNOWN_KIND))?, entries })
    }
}

/// What an object lacks whose maps cannot be handed on.
pub(super) const KNOWN_KIND: &str = "map of a known kind";

/// Loads the programs of the object once more, with these maps in the place of their own, and puts them in their places. (Before a program
/// is loaded, it names maps by descriptor; the library has no way to give it others.)
fn load(config: Config, maps: &[Shared], programs: &[&'static str]) -> Result<Loaded, KernelError> {
    let config = Pod(config);
    let mut loader = loader();
    loader.override_global("CONFIG", &config, true);
    for Shared { name, entries, .. } in maps {
        loader.map_max_entries(name, *entries);
    }
    let mut ebpf = loader.load(&object_or(OBJECT)).map_err(|error| KernelError::Load(Box::new(error)))?;
    for Shared { name, fd, .. } in maps {
        put_in_place(ebpf.map(name).ok_or(KernelError::Missing(KNOWN_KIND))?, *fd)?;
    }
    load_side_by_side(&mut ebpf, programs)?;
    let mut stages = take(&mut ebpf, "STAGES")?;
    put_stages(&mut ebpf, &mut stages, programs, |name| name != ENTRY)?;
    // The last one, for it leads to the others.
    put_stages(&mut ebpf, &mut stages, programs, |name| name == ENTRY)?;
    let told = |(name, program): (&str, &Program)| Some((name.to_owned(), program.info().ok()?));
    Ok(ebpf.programs().filter_map(told).collect())
}

/// Puts those of these programs in their places of the tail-call table.
pub(super) fn put_stages(
    ebpf: &mut Ebpf,
    stages: &mut ProgramArray<MapData>,
    programs: &[&'static str],
    wanted: impl Fn(&str) -> bool,
) -> Result<(), KernelError> {
    for (index, name) in (0_u32..).zip(STAGES).filter(|(_, name)| wanted(name) && programs.contains(name)) {
        let fd = perf_program(ebpf, name)?.fd().map_err(program_error(name))?;
        stages.set(index, fd, 0).map_err(KernelError::map("STAGES"))?;
    }
    Ok(())
}

impl Kernel {
    /// Whether what is loaded is made for a part of what there may be.
    pub(super) const fn is_narrow(&self) -> bool {
        self.narrow.is_some()
    }

    /// Loads what is made for everything if `lacks` holds of what is loaded. To be called before an entry says that there is such a
    /// process. Takes as long as the verifier.
    pub(super) fn widen_if(&mut self, lacks: impl FnOnce(&MadeFor) -> bool) -> Result<(), KernelError> {
        let Some(narrow) = self.narrow.as_mut().filter(|narrow| lacks(&narrow.made_for)) else { return Ok(()) };
        let rest = narrow.rest.take().ok_or(KernelError::Narrow)?;
        self.wide = Some(rest.load()?);
        self.narrow = None;
        Ok(())
    }
}

#[cfg(test)]
mod tests;
