//! Offsets of kernel structures, from the running kernel's own BTF.

use super::kept;
use crate::kept::Folder;
use btf_rs::{Backend, Btf, BtfType, Struct, Type};
use nix::sys::memfd::{MFdFlags, memfd_create};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::os::fd::AsRawFd as _;
use tachyon_common::config::{Config, flags, machine};
use tachyon_common::walk::THREAD_POINTER_REACH;

/// Otherwise the machine is x86-64.
const ARM64: bool = cfg!(target_arch = "aarch64");

/// Where the kernel publishes its types.
pub const VMLINUX_BTF: &str = "/sys/kernel/btf/vmlinux";

/// Why the kernel's structures could not be found.
#[derive(Debug, thiserror::Error)]
pub enum BtfError {
    /// The kernel publishes no BTF, or it cannot be read.
    #[error("cannot read the kernel's type information from {VMLINUX_BTF}")]
    Unreadable(#[source] std::io::Error),
    /// What the kernel publishes cannot be decoded.
    #[error("cannot decode the kernel's type information in {VMLINUX_BTF}")]
    Malformed(#[source] btf_rs::Error),
    /// A field that the profiler needs is not in this kernel.
    #[error("this kernel's {structure} has no field {field}: its layout is not one this version knows")]
    MissingField {
        /// The structure looked into.
        structure: &'static str,
        /// The field looked for.
        field: &'static str,
    },
}

impl BtfError {
    /// What to do next.
    #[must_use]
    pub const fn hint(&self) -> Option<&'static str> {
        match self {
            Self::Unreadable(_) => {
                Some("needs a kernel built with CONFIG_DEBUG_INFO_BTF (every current distribution kernel is)")
            }
            Self::Malformed(_) | Self::MissingField { .. } => None,
        }
    }
}

/// A [`Config`] with every kernel offset filled in, including what waits need where those are wanted; sampling choices are left at
/// zero. Without waits it is taken from the folder if it is kept there, or else is kept there from now on.
///
/// # Errors
/// When there is no BTF or a field is missing.
pub fn kernel_config(waits: bool, folder: Option<&Folder>) -> Result<Config, BtfError> {
    // For waits it depends on more than the kernel.
    let folder = folder.filter(|_| !waits);
    let config = match folder.and_then(kept::read) {
        Some(known) => known,
        None => {
            let found = offsets(waits)?;
            if let Some(folder) = folder {
                kept::write(folder, &found);
            }
            found
        }
    };
    Ok(Config { code_mask: if ARM64 { code_mask(first_stack()) } else { u64::MAX }, ..config })
}

/// The part of that which only depends on the kernel and on whether waits are wanted.
fn offsets(waits: bool) -> Result<Config, BtfError> {
    let btf = read()?;
    let kernel = Kernel { btf, structures: RefCell::default() };
    let offset = |structure, path| kernel.offset(structure, path);
    let queue = if waits { kernel.queue() } else { RunQueue::default() };
    // `struct thread_struct` is the architecture's own.
    let thread_pointer = offset("task_struct", &["thread", "fsbase"])
        .or_else(|_| offset("task_struct", &["thread", "uw", "tp_value"]))?;
    Ok(Config {
        task_thread_pointer: thread_pointer,
        task_tgid: offset("task_struct", &["tgid"])?,
        task_pid: offset("task_struct", &["pid"])?,
        task_group_leader: offset("task_struct", &["group_leader"])?,
        task_signal: offset("task_struct", &["signal"])?,
        task_thread_pid: offset("task_struct", &["thread_pid"])?,
        task_stack: offset("task_struct", &["stack"])?,
        task_mm: offset("task_struct", &["mm"])?,
        task_sum_exec_runtime: offset("task_struct", &["se", "sum_exec_runtime"])?,
        task_comm: offset("task_struct", &["comm"])?,
        // `state` before 5.14.
        task_state: offset("task_struct", &["__state"]).or_else(|_| offset("task_struct", &["state"]))?,
        task_start_time: offset("task_struct", &["start_time"])?,
        // Without CONFIG_SCHED_INFO the field does not exist.
        task_run_delay: offset("task_struct", &["sched_info", "run_delay"]).unwrap_or(0),
        task_last_queued: queue.task_last_queued,
        task_last_arrival: queue.task_last_arrival,
        rq_clock: queue.clock,
        task_cfs_rq: queue.task_cfs_rq,
        cfs_rq_rq: queue.cfs_rq_rq,
        preempt_count: queue.preempt_count,
        signal_live: offset("signal_struct", &["live"])?,
        signal_sum_sched_runtime: offset("signal_struct", &["sum_sched_runtime"])?,
        pid_level: offset("pid", &["level"])?,
        pid_numbers: offset("pid", &["numbers"])?,
        upid_size: kernel.size("upid")?,
        upid_ns: offset("upid", &["ns"])?,
        pid_ns_inum: offset("pid_namespace", &["ns", "inum"])?,
        mm_exe_file: offset("mm_struct", &["exe_file"])?,
        file_inode: offset("file", &["f_inode"])?,
        inode_ino: offset("inode", &["i_ino"])?,
        inode_sb: offset("inode", &["i_sb"])?,
        super_block_dev: offset("super_block", &["s_dev"])?,
        // `THREAD_SIZE` is a macro and so not in BTF: 16 KiB on x86-64 and on arm64 (without KASAN), but at least a page.
        thread_size: page_size().max(16 * 1024),
        pt_regs_size: kernel.size("pt_regs")?,
        machine: if ARM64 { machine::ARM64 } else { machine::X86_64 },
        thread_pointer_reach: if ARM64 { THREAD_POINTER_REACH } else { 0 },
        flags: if waits && kernel.tells_state() { flags::SWITCH_TELLS_STATE } else { 0 },
        ..Config::default()
    })
}

/// Whether this kernel counts how long threads are ready to run: it does if it has counted that this thread was given a CPU, the third
/// number. (Some kernels have the fields but count only if told so at boot: `CONFIG_TASK_DELAY_ACCT` without `CONFIG_SCHEDSTATS`.)
/// `TACHYON_WAIT_DELAYS=hook` says no, to test the alternative.
fn are_delays_counted() -> bool {
    if std::env::var_os("TACHYON_WAIT_DELAYS").is_some_and(|asked| asked == "hook") {
        return false;
    }
    let counts = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    counts.split_ascii_whitespace().nth(2).is_some_and(|turns| turns != "0")
}

/// An address in this process's first stack, which the kernel puts at the end of user space, below a random offset of at
/// most 2^30 bytes (`arch/arm64/include/asm/elf.h`).
fn first_stack() -> u64 {
    // SAFETY: reads the vector that the kernel has left; the pointer found there is not followed.
    unsafe { libc::getauxval(libc::AT_RANDOM) }
}

/// The bits of an address, given that `stack` is near the end of user space: 48 in Debian's kernels, 39 to 52 in others.
/// The bits above them in a return address are its signature.
fn code_mask(stack: u64) -> u64 {
    let bits = 64 - stack.leading_zeros();
    (1 << bits.clamp(39, 52)) - 1
}

/// Bytes of a page; 0 if the system does not say.
fn page_size() -> u32 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    size.ok().flatten().and_then(|size| u32::try_from(size).ok()).unwrap_or(0)
}

/// From a mapping, only the types asked for are decoded: that takes milliseconds instead of a hundred. Before Linux 6.16 the
/// file itself cannot be mapped, but a copy in memory can.
fn read() -> Result<Btf, BtfError> {
    Btf::from_file_with_backend(VMLINUX_BTF, Backend::Mmap).or_else(|_| {
        let copy = copy().map_err(BtfError::Unreadable)?;
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        // The mapping holds on to the copy, without its descriptor.
        Btf::from_file_with_backend(path, Backend::Mmap).map_err(BtfError::Malformed)
    })
}

/// The kernel's types in a file that can be mapped.
fn copy() -> std::io::Result<File> {
    let mut copy = File::from(memfd_create(c"tachyon-btf", MFdFlags::MFD_CLOEXEC)?);
    std::io::copy(&mut File::open(VMLINUX_BTF)?, &mut copy)?;
    Ok(copy)
}

/// The parts of its CPU's run queue that a task leads to; zeros where the kernel does not have them.
#[derive(Default)]
struct RunQueue {
    task_cfs_rq: u32,
    cfs_rq_rq: u32,
    clock: u32,
    task_last_queued: u32,
    task_last_arrival: u32,
    /// [`Config::preempt_count`].
    preempt_count: u32,
}

/// Structures that are reached from others: the structure, its fields from the outermost one on, and the type that the last one
/// has, points to or is an array of. Finding a structure by name means reading the names of all types.
const LED_TO: [(&str, &[&str], &str); 10] = [
    ("task_struct", &["signal"], "signal_struct"),
    ("task_struct", &["thread_pid"], "pid"),
    ("task_struct", &["mm"], "mm_struct"),
    ("task_struct", &["se", "cfs_rq"], "cfs_rq"),
    ("cfs_rq", &["rq"], "rq"),
    ("pid", &["numbers"], "upid"),
    ("upid", &["ns"], "pid_namespace"),
    ("mm_struct", &["exe_file"], "file"),
    ("file", &["f_inode"], "inode"),
    ("inode", &["i_sb"], "super_block"),
];

struct Kernel {
    btf: Btf,
    /// Structures by name.
    structures: RefCell<HashMap<&'static str, Option<Struct>>>,
}

impl Kernel {
    fn structure(&self, name: &'static str) -> Option<Struct> {
        if let Some(known) = self.structures.borrow().get(name) {
            return known.clone();
        }
        let found = self.led_to(name).or_else(|| self.find(name));
        self.structures.borrow_mut().insert(name, found.clone());
        found
    }

    /// A structure that is reached from another one, if that works in this kernel.
    fn led_to(&self, name: &str) -> Option<Struct> {
        let (from, path, _) = LED_TO.iter().find(|(.., to)| *to == name)?;
        let (last, outer) = path.split_last()?;
        let mut inside = self.structure(from)?;
        for field in outer {
            inside = self.compound(&self.member(&inside, field, 0)?.1)?;
        }
        let (_, member) = self.member(&inside, last, 0)?;
        let target = match self.btf.resolve_chained_type(&member).ok()? {
            Type::Ptr(pointer) => self.compound(&pointer),
            Type::Array(array) => self.compound(&array),
            _ => None,
        };
        target
            .filter(|found| !found.members.is_empty() && self.btf.resolve_name(found).is_ok_and(|found| found == name))
    }

    fn find(&self, name: &str) -> Option<Struct> {
        self.btf.resolve_types_by_name(name).ok()?.into_iter().find_map(|found| match found {
            Type::Struct(found) if !found.members.is_empty() => Some(found),
            _ => None,
        })
    }

    fn queue(&self) -> RunQueue {
        let offset = |structure, path: &[&'static str]| self.offset(structure, path).unwrap_or(0);
        // Without CONFIG_FAIR_GROUP_SCHED a task does not lead there.
        let task_cfs_rq = offset("task_struct", &["se", "cfs_rq"]);
        let leads = task_cfs_rq != 0;
        let delays = leads && are_delays_counted();
        let last = |path: &[&'static str]| if delays { offset("task_struct", path) } else { 0 };
        RunQueue {
            task_cfs_rq,
            cfs_rq_rq: offset("cfs_rq", &["rq"]),
            clock: offset("rq", &["clock"]),
            task_last_queued: last(&["sched_info", "last_queued"]),
            task_last_arrival: last(&["sched_info", "last_arrival"]),
            preempt_count: match (ARM64, leads) {
                (true, _) => offset("task_struct", &["thread_info", "preempt_count"]),
                (false, true) => self.preempt_count().unwrap_or(0),
                (false, false) => 0,
            },
        }
    }

    /// Whether `sched_switch` ends with the state of the thread that leaves: `(void *, bool, struct task_struct *, struct task_struct *,
    /// unsigned int)`. In the first releases of 5.18 that number came second.
    fn tells_state(&self) -> bool {
        let is_word = |parameter: &btf_rs::Parameter| {
            let found = self.btf.resolve_chained_type(parameter);
            matches!(found, Ok(Type::Int(number)) if number.size() == 4)
        };
        let parameters = self.tracepoint("btf_trace_sched_switch").unwrap_or_default();
        parameters.len() == 5 && parameters.last().is_some_and(is_word)
    }

    /// The parameters that a tracepoint's programs are called with, after one word of the kernel's own.
    fn tracepoint(&self, name: &str) -> Option<Vec<btf_rs::Parameter>> {
        let named = self.btf.resolve_types_by_name(name).ok()?.into_iter().find_map(|found| match found {
            Type::Typedef(found) => Some(found),
            _ => None,
        })?;
        let Type::Ptr(pointer) = self.btf.resolve_chained_type(&named).ok()? else { return None };
        match self.btf.resolve_chained_type(&pointer).ok()? {
            Type::FuncProto(found) => Some(found.parameters),
            _ => None,
        }
    }

    /// On x86-64 it is a per-CPU variable (in `pcpu_hot` from 6.2 to 6.14), located by its distance from another one that tasks lead
    /// to.
    fn preempt_count(&self) -> Option<u32> {
        let in_hot = || Some(self.cpu_variable("pcpu_hot")? + self.offset("pcpu_hot", &["preempt_count"]).ok()?);
        let at = self.cpu_variable("__preempt_count").or_else(in_hot)?;
        Some(at.wrapping_sub(self.cpu_variable("runqueues")?))
    }

    /// Offset of a per-CPU variable from the start of those variables.
    fn cpu_variable(&self, name: &str) -> Option<u32> {
        let sections = self.btf.resolve_types_by_name(".data..percpu").ok()?;
        let variables = sections.into_iter().find_map(|section| match section {
            Type::Datasec(section) => Some(section.variables),
            _ => None,
        })?;
        let named = |variable: &&btf_rs::VarSecinfo| {
            let found = self.btf.resolve_chained_type(*variable);
            found.is_ok_and(|found| matches!(found, Type::Var(found) if self.btf.resolve_name(&found).is_ok_and(|known| known == name)))
        };
        variables.iter().find(named).map(btf_rs::VarSecinfo::offset)
    }

    fn size(&self, name: &'static str) -> Result<u32, BtfError> {
        self.structure(name)
            .and_then(|found| u32::try_from(found.size()).ok())
            .ok_or(BtfError::MissingField { structure: name, field: "(its size)" })
    }

    /// Byte offset of the field reached by `path` from the start of `structure`.
    fn offset(&self, structure: &'static str, path: &[&'static str]) -> Result<u32, BtfError> {
        let missing = |field| BtfError::MissingField { structure, field };
        let mut at = 0;
        let mut inside = self.structure(structure).ok_or(missing("(the structure itself)"))?;
        for (depth, field) in path.iter().enumerate() {
            let (offset, member) = self.member(&inside, field, 0).ok_or(missing(field))?;
            at += offset;
            if depth + 1 < path.len() {
                inside = self.compound(&member).ok_or(missing(field))?;
            }
        }
        Ok(at)
    }

    /// A member by name, also inside anonymous structures and unions, with its offset in bytes.
    fn member(&self, inside: &Struct, name: &str, depth: u32) -> Option<(u32, btf_rs::Member)> {
        // C allows any depth; kernels use three or four.
        if depth > 8 {
            return None;
        }
        for member in &inside.members {
            let member_name = self.btf.resolve_name(member).unwrap_or_default();
            if member_name == name {
                return Some((member.bit_offset() / 8, member.clone()));
            }
            if member_name.is_empty()
                && let Some(anonymous) = self.compound(member)
                && let Some((offset, found)) = self.member(&anonymous, name, depth + 1)
            {
                return Some((member.bit_offset() / 8 + offset, found));
            }
        }
        None
    }

    /// The structure or union that is the type of a member, or of what a pointer or an array refers to, through typedefs,
    /// qualifiers and tags.
    fn compound(&self, refers: &dyn BtfType) -> Option<Struct> {
        let mut found = self.btf.resolve_chained_type(refers).ok()?;
        for _ in 0..8 {
            found = match found {
                Type::Struct(found) | Type::Union(found) => return Some(found),
                Type::Typedef(next) => self.btf.resolve_chained_type(&next).ok()?,
                Type::Const(next) => self.btf.resolve_chained_type(&next).ok()?,
                Type::Volatile(next) => self.btf.resolve_chained_type(&next).ok()?,
                // `__rcu`, as Clang records it.
                Type::TypeTag(next) => self.btf.resolve_chained_type(&next).ok()?,
                _ => return None,
            };
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kept::SymbolCache;

    #[test]
    fn this_kernel_has_every_field() {
        let config = kernel_config(true, None).expect("this machine's kernel publishes its types");
        assert_eq!(config.task_tgid, config.task_pid + 4, "pid and tgid lie side by side in every kernel");
        assert_eq!(config.pt_regs_size % 8, 0);
        assert!(config.upid_size >= 16, "a number and a namespace pointer");
        assert_eq!(config.code_mask & first_stack(), first_stack());
        assert_ne!(config.preempt_count, 0, "Debian's kernels and this one tell it");
        assert!(config.task_last_queued != 0 && config.task_last_arrival != 0 && config.rq_clock != 0, "likewise");
        assert_eq!(config.flags, flags::SWITCH_TELLS_STATE, "this kernel is newer than 5.18");
        assert!(config.task_thread_pointer > config.task_comm, "the architecture's part comes last");
    }

    #[test]
    fn what_is_kept_is_what_the_kernel_says() {
        let above = tempfile::tempdir().expect("a folder");
        let folder = SymbolCache::at(above.path().join("kept")).open().expect("it is ours");
        let read = kernel_config(false, None).expect("this machine's kernel publishes its types");
        for _ in 0..2 {
            assert_eq!(kernel_config(false, Some(&folder)).expect("likewise"), read);
        }
        assert_eq!(kept::read(&folder).map(|kept| kept.task_tgid), Some(read.task_tgid));
        let kept = Config { task_tgid: 1, ..read };
        kept::write(&folder, &kept);
        assert_eq!(kernel_config(false, Some(&folder)).expect("likewise"), kept, "it is not looked for again");
    }

    /// The structure reached from another one is the one with that name, and is reached in this kernel: a renamed field would make
    /// the start slower.
    #[test]
    fn structures_that_others_lead_to_are_those_of_the_name() {
        let kernel = Kernel { btf: read().expect("good"), structures: RefCell::default() };
        for (.., name) in LED_TO {
            let led_to = kernel.led_to(name).unwrap_or_else(|| panic!("nothing leads to {name}"));
            let found = kernel.find(name).expect("it has a name");
            assert_eq!((led_to.size(), led_to.members.len()), (found.size(), found.members.len()), "{name}");
        }
    }

    #[test]
    fn a_copy_tells_the_same() {
        let copy = copy().expect("readable");
        let path = format!("/proc/self/fd/{}", copy.as_raw_fd());
        let kernel = |btf| Kernel { btf, structures: RefCell::default() };
        let copied = kernel(Btf::from_file_with_backend(path, Backend::Mmap).expect("good"));
        drop(copy);
        let read = kernel(read().expect("good"));
        for (structure, path) in [("task_struct", &["se", "sum_exec_runtime"][..]), ("super_block", &["s_dev"])] {
            let offset = copied.offset(structure, path).expect("every kernel has it");
            assert_eq!(offset, read.offset(structure, path).expect("every kernel has it"));
        }
    }

    #[test]
    fn a_signature_lies_above_the_addresses() {
        let masks = [0xffff_f7a3_1230, 0x7f_f123_4560, 0xf_ffff_ffff_0000, 0].map(code_mask);
        assert_eq!(masks, [(1 << 48) - 1, (1 << 39) - 1, (1 << 52) - 1, (1 << 39) - 1]);
    }
}
