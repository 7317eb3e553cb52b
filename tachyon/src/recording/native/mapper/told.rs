//! The messages to the thread, and what it leaves behind.

use crate::remote::{FileIdentity, MappedFile};
use crate::types::KtimeNs;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::mpsc::Sender;

/// A message to the thread.
#[derive(Clone, Debug)]
pub(in crate::recording) enum News {
    /// A process is CPython; `interpreter` is the file that holds it, where it was just found.
    Python { pid: u32, image: u64, instance: u64, interpreter: Option<FileIdentity> },
    /// A file that a process is about to map, and whether it holds an interpreter.
    Expected { file: Arc<MappedFile>, interpreter: bool },
    /// A process was forked from one that is CPython.
    Forked { pid: u32, image: u64, instance: u64 },
    /// A process mapped a file at this time: device and inode, as mappings have them.
    Mapped { pid: u32, time: KtimeNs, dev: (u32, u32), inode: u64 },
    /// Mappings were missed.
    Lost,
    /// A process's samples meet unknown code.
    Unknown { pid: u32 },
    /// A process's sample of this time has met unknown code: publish what it has mapped since it was looked at, then reply.
    Overtaken { pid: u32, time: KtimeNs, done: Sender<()> },
    /// A process's stack, which began at `sp`, ends at an address in code whose rules are not made yet.
    Met { pid: u32, address: u64, sp: u64 },
    /// A process's stack has code in no file, without a name, which was called from there.
    Unnamed { pid: u32, address: u64, caller: Option<u64> },
    /// A process has ended, or executes another program.
    Gone { pid: u32 },
    /// Look at processes that have never been looked at, then reply.
    Finish(Sender<()>),
    /// Reply with what it would leave behind now.
    Tell(Sender<Mapped>),
}

/// What the thread leaves behind.
#[derive(Clone, Debug, Default)]
pub(in crate::recording) struct Mapped {
    /// Files without usable tables, by path, each with its reason.
    pub refused: BTreeMap<String, String>,
    /// What works less well than it should.
    pub notes: BTreeSet<String>,
    /// Bytes of tables in use.
    pub table_bytes: u64,
    /// Bytes that all wanted tables would take; `None`: all had room.
    pub table_bytes_wanted: Option<u64>,
}
