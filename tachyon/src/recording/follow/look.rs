//! Looks at a process and writes the decision: the only place that decides on an entry of the kernel side's table.

use super::decision::{Before, Found, Step, decide};
use super::starts::{KNOWN_FOR, executable};
use super::work::Running;
use super::{DECIDED, Follower, is_open, is_other, lock};
use crate::discover;
use crate::inspect::{self, Interpreter};
use crate::kernel::{FileKey, KernelError};
use crate::machine::target_hint;
use crate::recording::registry::{ProcessInfo, Program, cpu_time_ns, read_details};
use crate::remote::RemoteProcess;
use crate::remote::ledger::{self, Work};
use crate::types::{KtimeNs, Pid};
use std::time::Instant;
use tachyon_common::event::ProcessRecord;
use tachyon_common::process::{Life, ProcessEntry, flags};

impl Follower {
    /// Looks at a process that exists already and gives it an entry. `Ok(None)`: not CPython, or not asked for.
    ///
    /// # Errors
    /// When it cannot be inspected or profiled, or the kernel's tables are full.
    pub fn adopt(&mut self, pid: u32) -> anyhow::Result<Option<Box<Interpreter>>> {
        if !self.admits(Pid(pid))? {
            self.set_aside(pid, self.flags & !flags::SELECTED)?;
            return Ok(None);
        }
        let process = RemoteProcess::at(Pid(pid));
        let found = self.examine(&process);
        let (entry, program) = match (decide(&found, Before::LastLook), &found) {
            (Step::Python, Found::Python(interpreter)) => {
                let running = self.tasks_of(&process, interpreter);
                (self.entry_of(interpreter, running)?, program(interpreter))
            }
            (Step::Other { .. }, _) => (other(), Program::Other),
            _ => return Err(found.into_error()),
        };
        let fresh = self.fresh();
        let entry = ProcessEntry { flags: entry.flags | self.flags, image: fresh, instance: fresh, ..entry };
        if !lock(&self.kernel).add_process(pid, &entry)? {
            // It already has an entry, from its parent or its `exec`, which may say less.
            self.look(pid, true);
        } else if program != Program::Other {
            let info = ProcessInfo::new(pid, fresh, program, cpu_time_ns(pid).unwrap_or(0));
            lock(&self.registry).insert(fresh, info);
            self.look_closer(pid, fresh, fresh);
            if let Found::Python(interpreter) = &found {
                self.is_python(pid, fresh, fresh, Some(interpreter.file));
                self.work.begin(pid, false);
            }
        }
        match found {
            Found::Python(interpreter) => Ok(Some(interpreter)),
            Found::Nothing => Ok(None),
            found => Err(found.into_error()),
        }
    }

    /// Looks at a program that starts, if that may show anything: at once, since it may live for only a few milliseconds.
    pub(super) fn look_at_start(&mut self, record: &ProcessRecord) {
        let (pid, now) = (record.tgid, Instant::now());
        let is_known = !self.ahead.remove(&pid) && self.starts.is_other(record, now);
        let is_dull = is_known && self.starts.is_dull(record, now);
        if let Some(open) = self.undecided.get_mut(&pid) {
            (open.executable, open.is_promising) = (Some(executable(record)), !is_dull);
        }
        let flags = self.flags_of(pid);
        // The record of its end comes next; there is only something to look at if the kernel side has recognised the
        // program.
        let has_ended = flags == 0 || flags & flags::EXITED != 0;
        // With a filter, each process may have to be checked against it.
        let is_left_out = is_known && self.filter.is_empty() && is_open(flags);
        // If its executable sometimes becomes CPython, a process that ends before it was looked at may have been CPython.
        if is_dull && (has_ended || is_left_out) {
            lock(&self.registry).looked_at(record.instance, record.image);
        }
        if has_ended && flags & flags::PYTHON == 0 {
            return;
        }
        if is_left_out {
            if let Some(open) = self.undecided.get_mut(&pid) {
                open.has_told_all = true;
            }
            return;
        }
        let user = self.charged_for(pid);
        if !self.queue.may(pid, user, now) {
            ledger::put_off(Work::Look, pid, user);
            self.queue.ask(pid, user);
            // A program that the kernel side recognised may have ended by then.
            if let Some(info) = lock(&self.registry).by_pid(pid) {
                info.read_names();
            }
            return;
        }
        self.look_for(pid, user, false);
        let runs_still = |life: Life| life.image == record.image && life.flags & flags::EXITED == 0;
        if self.undecided.get(&pid).is_some_and(|open| open.has_told_all)
            && lock(&self.kernel).process(pid).is_some_and(runs_still)
        {
            self.starts.was_other(record, now);
            // Otherwise nothing else might wake this thread.
            if self.all_python && self.filter.is_empty() && self.starts.is_dull(record, now) {
                lock(&self.kernel).let_wait(executable(record), KtimeNs::now().after(KNOWN_FOR));
            }
        }
    }

    /// Inspects a process that has a new image, or has mapped something since the last look, and decides on it.
    pub(super) fn look(&mut self, pid: u32, last_look: bool) {
        let known = {
            let kernel = lock(&self.kernel);
            kernel.process(pid).map(|life| (life, kernel.entry(&life)))
        };
        let Some((life, entry)) = known else { return };
        let entry_flags = entry.map_or(life.flags, |entry| entry.flags);
        let before = match entry_flags & (flags::SELECTED | DECIDED) {
            // An executable that the kernel side recognised at its `exec` still has to be known here.
            python if python & flags::PYTHON != 0 => {
                self.decided(pid);
                return self.confirm(pid, &life, entry.map_or(0, |entry| entry.layout));
            }
            _ if is_other(entry_flags) => Before::Other,
            flags::SELECTED if last_look => Before::LastLook,
            flags::SELECTED => Before::Open,
            // Not one of ours.
            _ => return self.decided(pid),
        };
        // If it exited while undecided, the exit record will settle the rest.
        if life.flags & flags::EXITED != 0 {
            self.decided(pid);
            return;
        }
        match self.admits(Pid(pid)) {
            Ok(true) => {}
            Ok(false) if before == Before::Other => return,
            Ok(false) => {
                let kept = entry_flags & !(DECIDED | flags::SELECTED);
                let entry = ProcessEntry { flags: kept | flags::NOT_PYTHON, ..other() };
                return self.write(pid, &life, before, &entry, None);
            }
            // It is gone.
            Err(_) => return,
        }
        let Ok(process) = RemoteProcess::open(Pid(pid)) else { return };
        let found = self.examine(&process);
        let step = decide(&found, before);
        self.note_what_was_clear(pid, &found);
        match (step, found) {
            (Step::Python, Found::Python(interpreter)) => match self.young_entry_of(&process, &interpreter) {
                Ok(entry) => {
                    let entry = ProcessEntry { flags: entry.flags | (entry_flags & !DECIDED), ..entry };
                    self.write(pid, &life, before, &entry, Some(&interpreter));
                }
                Err(error) => self.refuse(pid, &error.to_string()),
            },
            (Step::Leave { tell: true }, found) => self.tell_why(pid, found),
            (Step::Other { tell }, found) => {
                if tell {
                    self.tell_why(pid, found);
                }
                let entry = ProcessEntry { flags: (entry_flags & !DECIDED) | flags::NOT_PYTHON, ..other() };
                self.write(pid, &life, before, &entry, None);
            }
            // A process that has ended has no mappings, which says nothing about what it was.
            (Step::Wait { looked_at: true }, _) if is_running(pid) => {
                lock(&self.registry).looked_at(life.instance, life.image);
            }
            _ => {}
        }
    }

    /// Notes whether the next mapping of a file that is not CPython calls for a look.
    fn note_what_was_clear(&mut self, pid: u32, found: &Found) {
        let has_told_all = matches!(found, Found::Nothing);
        if let Some(open) = self.undecided.get_mut(&pid) {
            open.has_told_all = has_told_all;
        }
        // A process that is gone will have no more mapping events.
        if has_told_all || matches!(found, Found::Gone(_)) {
            self.unclear.remove(&pid);
        } else {
            self.unclear.insert(pid);
        }
    }

    /// Revokes the decision that a process is CPython: from now on it is not sampled. Its earlier samples stay.
    pub(super) fn take_back(&self, pid: u32) {
        let mut kernel = lock(&self.kernel);
        let Some(life) = kernel.process(pid) else { return };
        let Some(entry) = kernel.entry(&life) else { return };
        let flags = (entry.flags & !flags::PYTHON) | flags::NOT_PYTHON;
        let written = kernel.decide(pid, &life, &ProcessEntry { flags, ..entry });
        drop(kernel);
        if let Err(error) = written {
            self.refuse(pid, &error.to_string());
        }
    }

    /// Writes a decision, if the program that it is about still runs, and notifies the other threads.
    fn write(&mut self, pid: u32, life: &Life, before: Before, entry: &ProcessEntry, found: Option<&Interpreter>) {
        let executable = self.undecided.remove(&pid).and_then(|open| open.executable).filter(|_| found.is_some());
        let unexpected = executable.filter(|executable| self.starts.became_python(*executable));
        let mut kernel = lock(&self.kernel);
        if let Some(executable) = unexpected {
            kernel.let_wait(executable, KtimeNs(0));
        }
        let written = kernel.decide(pid, life, entry);
        // Read after the write: from then on the count no longer grows.
        let uninspected = kernel.process(pid).filter(|now| now.entry == life.entry).map_or(0, |now| now.uninspected);
        drop(kernel);
        match written {
            Ok(true) => {}
            // What was looked at no longer runs there.
            Ok(false) => return,
            Err(error) => return self.refuse(pid, &error.to_string()),
        }
        let mut registry = lock(&self.registry);
        match found {
            Some(interpreter) => {
                registry.is_python(pid, life, program(interpreter));
                if before == Before::Other {
                    // What it did before was accounted for by the earlier decision.
                    registry.late(life.instance, uninspected);
                } else {
                    registry.inspected(life.instance, uninspected, true);
                }
                drop(registry);
                self.look_closer(pid, life.image, life.instance);
                self.is_python(pid, life.image, life.instance, Some(interpreter.file));
                self.work.begin(pid, true);
            }
            None if entry.flags & flags::SELECTED == 0 => registry.turn_away(life.instance, uninspected),
            None => {
                registry.inspected(life.instance, uninspected, false);
                registry.leave(life.instance);
            }
        }
    }

    /// Completes what is known about a process whose entry the kernel side made by itself.
    fn confirm(&mut self, pid: u32, life: &Life, layout: u32) {
        // An `exec` whose fork was never reported put it there, and nothing is decided.
        let decided = |info: &ProcessInfo| info.image == life.image && info.program != Program::Unknown;
        if lock(&self.registry).get(life.instance).is_some_and(decided) {
            return;
        }
        self.is_python(pid, life.image, life.instance, None);
        self.work.begin(pid, true);
        let mut registry = lock(&self.registry);
        let hex = registry.layout(layout).map_or(0, |layout| layout.version_hex);
        registry.is_python(pid, life, Program::Python(hex, inspect::version_text(hex)));
        drop(registry);
        self.look_closer(pid, life.image, life.instance);
    }

    /// Reads whatever else was asked for about a process that runs CPython.
    fn look_closer(&self, pid: u32, image: u64, instance: u64) {
        let Some(variables) = &self.variables else { return };
        let details = read_details(pid, variables);
        lock(&self.registry).add_details(instance, image, details);
    }

    /// Finds out what a process is; tests its layout on the live runtime where needed.
    fn examine(&mut self, process: &RemoteProcess) -> Found {
        let found = Found::of(inspect::inspect(process, &mut self.cache));
        if let Found::Python(interpreter) = &found
            && let Err(error) = self.is_sane(process, interpreter)
        {
            let version = interpreter.version_text();
            return Found::Refused(format!(
                "CPython {version}: its layout fails the test on the live process: {error}"
            ));
        }
        found
    }

    /// Says why a process is not profiled.
    fn tell_why(&self, pid: u32, found: Found) {
        match found {
            Found::Refused(why) | Found::Unclear(why) => self.refuse(pid, &why),
            Found::Unreadable(error) => {
                if let Some(hint) = target_hint(&anyhow::Error::new(error)) {
                    self.refuse(pid, &format!("it cannot be looked at; {hint}"));
                }
            }
            Found::Python(_) | Found::Nothing | Found::Gone(_) => {}
        }
    }

    /// Tests a layout that was not taken from this very build's headers on the live runtime.
    fn is_sane(&self, process: &RemoteProcess, interpreter: &Interpreter) -> Result<(), inspect::SelfTestError> {
        if let Some(error) = &interpreter.entering_error {
            let note = format!(
                "{}: {error}: samples taken while the evaluator is entered may be wrong",
                interpreter.path.display()
            );
            lock(&self.registry).note(note);
        }
        if interpreter.known_build {
            return Ok(());
        }
        match inspect::self_test(process, interpreter) {
            Err(inspect::SelfTestError::NotInitialized) => Ok(()),
            tested => tested,
        }
    }

    /// The entry of a process that has just started or loaded CPython. Until it has one its samples are lost, so what it
    /// imports later is looked up later.
    fn young_entry_of(
        &mut self,
        process: &RemoteProcess,
        interpreter: &Interpreter,
    ) -> Result<ProcessEntry, KernelError> {
        // If asyncio is a module of its own, it is not loaded yet.
        let built_in = interpreter.asyncio_built_in;
        let running = if built_in { self.tasks_in_files(process, interpreter) } else { Running::default() };
        self.entry_of(interpreter, running)
    }

    fn entry_of(&mut self, interpreter: &Interpreter, running: Running) -> Result<ProcessEntry, KernelError> {
        let Running { asyncio, current_tasks } = running;
        let mut kernel = lock(&self.kernel);
        let layout = interpreter.layout.complete();
        let number = kernel.layout_number(&layout)?;
        lock(&self.registry).set_layout(number, &layout);
        let (window, cframe_offset, evaluator) = match &interpreter.entering {
            Some(window) => (window.addresses.clone(), window.cframe_offset, window.evaluator.clone()),
            None => (0..0, None, 0..0),
        };
        let entry = ProcessEntry {
            runtime: interpreter.runtime,
            code_type: interpreter.code_type,
            none: interpreter.none,
            entering_start: window.start,
            entering_end: window.end,
            cframe_offset: cframe_offset.unwrap_or(0),
            evaluator_start: evaluator.start,
            evaluator_end: evaluator.end,
            layout: number,
            asyncio,
            current_tasks,
            flags: flags::PYTHON | if interpreter.asyncio_built_in { flags::ASYNCIO_BUILT_IN } else { 0 },
            ..ProcessEntry::default()
        };
        // With a filter, only user space knows which of its processes are wanted.
        if interpreter.static_address && self.filter.is_empty() {
            let key = FileKey::of_stat(interpreter.file.dev, interpreter.file.inode);
            // Another process of this executable keeps its tasks elsewhere.
            let asyncio = if current_tasks == 0 { asyncio } else { 0 };
            kernel.set_executable(key, &ProcessEntry { asyncio, current_tasks: 0, ..entry })?;
        }
        Ok(entry)
    }
}

/// The entry of a process that is not CPython.
fn other() -> ProcessEntry {
    ProcessEntry { flags: flags::NOT_PYTHON, ..ProcessEntry::default() }
}

/// How the registry describes it.
fn program(interpreter: &Interpreter) -> Program {
    Program::Python(interpreter.layout.version_hex, interpreter.version_text())
}

/// Whether a process has memory of its own still.
fn is_running(pid: u32) -> bool {
    discover::look_at(Pid(pid)).is_ok_and(|process| process.has_memory())
}
