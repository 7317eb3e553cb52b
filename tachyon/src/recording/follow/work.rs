//! Where a process keeps whose work its threads do: found when it is inspected, or once it has loaded what keeps it.

use super::{Follower, lock};
use crate::inspect::{self, Interpreter, Verdict};
use crate::remote::RemoteProcess;
use crate::remote::ledger::{self, Work};
use crate::types::Pid;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::time::Instant;
use tachyon_common::process::{ProcessEntry, flags};

/// Beginning of the name of asyncio's extension module, `_asyncio.cpython-314-….so`.
const ASYNCIO: &[u8] = b"_asyncio.";

/// Whether a file that a process maps may tell where its tasks are.
pub(super) fn may_tell_of_tasks(path: &OsStr) -> bool {
    Path::new(path).file_name().is_some_and(|name| name.as_bytes().starts_with(ASYNCIO))
}

impl Follower {
    /// Looks at a process that has mapped such a file.
    pub(super) fn look_for_tasks(&mut self, pid: u32) {
        let known = {
            let kernel = lock(&self.kernel);
            kernel.process(pid).and_then(|life| Some((life, kernel.entry(&life)?)))
        };
        let Some((life, entry)) = known else { return };
        const WANTED: u32 = flags::PYTHON | flags::SELECTED;
        if entry.flags & WANTED != WANTED || entry.asyncio != 0 {
            return;
        }
        let user = super::user_of(pid);
        if !self.queue.may(pid, user, Instant::now()) {
            ledger::put_off(Work::Look, pid, user);
            return;
        }
        let begun = ledger::thread_time();
        let found = RemoteProcess::open(Pid(pid)).ok().and_then(|process| {
            let Ok(Verdict::Python(interpreter)) = inspect::inspect(&process, &mut self.cache) else { return None };
            Some(self.tasks_of(&process, &interpreter)).filter(|&number| number != 0)
        });
        self.queue.spent(pid, user, 2 * ledger::thread_time().saturating_sub(begun), Instant::now());
        if let Some(asyncio) = found {
            let written = lock(&self.kernel).decide(pid, &life, &ProcessEntry { asyncio, ..entry });
            if let Err(error) = written {
                self.refuse(pid, &error.to_string());
            }
        }
    }

    /// The number of where a process keeps its running tasks; 0: it does not say.
    pub(super) fn tasks_of(&mut self, process: &RemoteProcess, interpreter: &Interpreter) -> u16 {
        let offsets = inspect::asyncio_offsets(process, interpreter, &mut self.cache);
        let asyncio = offsets.zip(interpreter.awaits.as_ref()).and_then(|(offsets, awaits)| offsets.for_kernel(awaits));
        let Some(asyncio) = asyncio else { return 0 };
        let number = lock(&self.kernel).asyncio_number(&asyncio);
        match number {
            Ok(Some(number)) => number,
            Ok(None) => {
                self.note("more builds of asyncio than there is room for: tasks of some have no names".to_owned());
                0
            }
            Err(error) => {
                self.note(format!("tasks have no names: {error}"));
                0
            }
        }
    }
}
