//! Looks at processes: reads what they map, publishes it, and makes the tables of what samples meet.

use super::found::{Place, digest};
use super::hints::{hints, main_stack, trampolines_of};
use super::process::Process;
use super::{
    AGAIN, AT_A_TIME, AT_FIRST, EAGER, EAGER_REST, FRESH, LONG_REST, LONGEST_REST, MAX_MAPPINGS, MAX_SEEN, MEETING,
    REST,
};
use super::{AddressSpace, Worker};
use crate::recording::follow::lock;
use crate::remote::ledger::{self, Work};
use crate::remote::{FileIdentity, MappedPath, Mapping, RemoteProcess};
use crate::types::{KtimeNs, Pid};
use crate::unwind::{ARENA, Generated, Table, Wanted};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a process maps.
struct Mappings {
    process: RemoteProcess,
    seen_at: KtimeNs,
    /// Those that may hold code.
    maps: Vec<Mapping>,
    digest: u64,
    /// Rules of generated code that is recognised by its instructions, by the start of its mapping.
    trampolines: HashMap<u64, Arc<Table>>,
    /// Files, by the start of their mapping.
    identities: HashMap<u64, FileIdentity>,
    /// An address in the main thread's stack.
    main_stack: Option<u64>,
}

impl Worker {
    /// Looks at such processes, until that has taken as long as `slice`.
    pub(super) fn look_at(&mut self, such: impl Fn(&Process) -> bool, slice: Duration) {
        let now = Instant::now();
        let due = self.processes.iter().filter(|(_, process)| such(process));
        // The user who has cost least comes first, and of that user's processes the one last looked at longest ago.
        let mut due: Vec<_> =
            due.map(|(&pid, process)| (self.debts.of_user(process.user, now), process.looked, pid)).collect();
        due.sort_unstable();
        let begun = Instant::now();
        for (_, _, pid) in due {
            // Others that come first may have arrived meanwhile.
            if self.stop.load(Ordering::Acquire) || begun.elapsed() > slice {
                return;
            }
            let Some(process) = self.processes.get_mut(&pid) else { continue };
            let (begun, worked, user) = (Instant::now(), ledger::thread_time(), process.user);
            if !self.debts.may(pid, user, Duration::ZERO, begun) {
                ledger::put_off(Work::Tables, pid, user);
                process.due = Some(self.debts.until(pid, user, begun).max(begun + AGAIN));
                continue;
            }
            (process.due, process.looked) = (None, Some(begun));
            let asked = process.take();
            self.look(pid, asked);
            if let Some(process) = self.processes.get_mut(&pid) {
                let (now, took) = (Instant::now(), begun.elapsed());
                process.spent += took;
                let rest = if process.spent < EAGER { EAGER_REST } else { REST };
                let fresh = process.spent < FRESH;
                process.rests_until = (!fresh).then(|| now + (took * rest).min(LONGEST_REST));
                process.meets_from = (!fresh).then(|| now + took.min(LONGEST_REST));
                self.debts.spent(pid, user, ledger::thread_time().saturating_sub(worked), now);
                if process.more {
                    process.ask(now + MEETING);
                }
            }
        }
    }

    /// Reads what a process maps, and publishes it.
    fn mappings(&mut self, pid: u32) -> Option<Mappings> {
        let known = self.processes.get_mut(&pid)?;
        // If it is gone, that will be reported soon.
        let process = RemoteProcess::open(Pid(pid)).ok()?;
        let seen_at = KtimeNs::now();
        let mut maps = process.maps().ok()?;
        known.seen_at = seen_at;
        let Process { image, instance, user, published, .. } = *known;
        let main_stack = main_stack(&maps);
        maps.retain(|mapping| mapping.executable);
        if maps.len() > MAX_MAPPINGS {
            let count = maps.len();
            self.left.notes.insert(format!(
                "pid {pid} (user {user}): it has {count} executable mappings: of those behind the first {MAX_MAPPINGS} \
                 native stacks are missing"
            ));
            maps.truncate(MAX_MAPPINGS);
        }
        let digest = digest(&maps);
        let trampolines = trampolines_of(&process, &maps);
        let seen = self.seen.remove(&pid);
        let is_published = digest == published && seen.is_some();
        let mut seen = seen.unwrap_or_default();
        if is_published {
            self.spaces.seen(image, instance, seen_at);
        } else {
            let mut now = HashMap::new();
            let mut code = Vec::new();
            for mapping in &maps {
                // Files may take long, and the recording may be over.
                if self.stop.load(Ordering::Acquire) {
                    return None;
                }
                let place = Place::of(mapping);
                let known = place.and_then(|place| seen.remove(&place));
                let found = known.unwrap_or_else(|| self.code((&process, seen_at), mapping, &trampolines));
                code.push(found.code.clone());
                // What was not found now may be found later.
                now.extend(place.filter(|_| found.file.is_some()).map(|place| (place, found)));
            }
            seen = now;
            let before = self.spaces.get(image, instance);
            // It may have executed another program meanwhile: then these mappings are that program's, and nobody asks for
            // them.
            self.spaces.set(image, instance, AddressSpace::new(code, before.as_deref()), seen_at);
            if let Some(process) = self.processes.get_mut(&pid) {
                process.published = digest;
            }
        }
        let identities = seen.iter().filter_map(|(place, seen)| Some((place.start, seen.file?))).collect();
        if self.seen.len() >= MAX_SEEN {
            self.seen.clear();
        }
        self.seen.insert(pid, seen);
        Some(Mappings { process, seen_at, maps, digest, trampolines, identities, main_stack })
    }

    /// Publishes what a process maps, if a sample of this time has met code that was mapped since it was looked at.
    pub(super) fn catch_up(&mut self, pid: u32, time: KtimeNs) {
        let Some(process) = self.processes.get(&pid).filter(|process| process.seen_at < time) else { return };
        let (worked, user) = (ledger::thread_time(), process.user);
        if self.debts.may(pid, user, Duration::ZERO, Instant::now()) {
            self.mappings(pid);
            self.debts.spent(pid, user, ledger::thread_time().saturating_sub(worked), Instant::now());
        }
    }

    fn look(&mut self, pid: u32, mut known: Process) {
        let Some(Mappings { process, seen_at, maps, digest: mapped, trampolines, identities, main_stack }) =
            self.mappings(pid)
        else {
            return;
        };
        // Prepares the code that the main thread is in, or was a moment ago, before the first sample meets it. Not at the first
        // look, which the first sample waits for.
        let main_stack = main_stack.filter(|_| known.looked_at && !known.hinted);
        let mut stale = mapped != known.mapped || known.more;
        let made =
            |mapping: &Mapping| mapping.path == MappedPath::Anonymous && !trampolines.contains_key(&mapping.start);
        // This, too, before the first sample meets it, but not at the first look, which that sample waits for.
        let news = known.looked_at && (!known.hinted || mapped != known.mapped);
        let meets_made = maps
            .iter()
            .any(|mapping| made(mapping) && (news || known.met.iter().any(|&address| mapping.contains(address))));
        if meets_made && self.made.renew(&process, &maps, (&identities, &known.callers), Instant::now()) {
            stale = true;
            if let Some(space) = self.spaces.get(known.image, known.instance) {
                self.spaces.set(known.image, known.instance, space.with(self.made.functions(pid)), seen_at);
            }
        }
        let mut met = std::mem::take(&mut known.met);
        // What samples wait for comes first, what nobody has asked for comes later.
        let waited_for = !met.is_empty();
        let allowance = match known.looked_at {
            _ if waited_for => 0,
            false => AT_FIRST,
            true => AT_A_TIME,
        };
        if waited_for {
            met.extend(hints(&process, &maps, &known.stacks));
        }
        if let Some(stack) = main_stack {
            met.extend(hints(&process, &maps, &BTreeSet::from([stack])));
        }
        for address in met {
            if let Some(mapping) = maps.iter().find(|mapping| mapping.contains(address)) {
                stale |= self.tables.meet(&process, mapping, address, known.version, &identities, &mut self.maps);
            }
        }
        if !stale {
            return;
        }
        // Each piece of a file that is left out costs a sample, which then asks for it.
        let left = waited_for || self.tables.make_more(&process, &maps, &identities, &mut self.maps).1;
        let first = self.interpreters.keys().copied().collect();
        let mut generated = self.made.tables(pid, &maps);
        generated.extend(trampolines.into_iter().map(|(start, table)| (start, Generated { table, len: ARENA })));
        let wanted = Wanted {
            identities: Some(&identities),
            image: known.image,
            first: Some(&first),
            generated: Some(&generated),
            allowance: Some(allowance),
        };
        let space = match self.tables.map_some(&process, &maps, &wanted, &mut self.maps) {
            Ok((space, more)) => {
                (known.version, known.more) = (space.version, more || left || !known.looked_at);
                // Before a stack can lead through it.
                self.spaces.assembly.add(self.tables.take_assembly());
                space
            }
            Err(no_room) => {
                self.left.notes.insert(format!("native stacks of some processes are missing: {no_room}"));
                self.make_room(known.user);
                if let Some(process) = self.processes.get_mut(&pid) {
                    process.ask(Instant::now() + AGAIN);
                }
                return;
            }
        };
        if let Err(error) = self.maps.set_space(pid, &space) {
            self.left.notes.insert(format!("native stacks of some processes are missing: {error}"));
            return;
        }
        let is_it = lock(&self.kernel).process(pid).is_some_and(|entry| entry.image == known.image);
        if !is_it {
            // It ended or executed another program before its space was written: nobody else would remove the space.
            self.maps.remove_space(pid);
        } else if let Some(process) = self.processes.get_mut(&pid) {
            (process.mapped, process.version, process.more) = (mapped, known.version, known.more);
            process.ranges = space.count;
            process.hinted |= process.looked_at;
            process.looked_at = true;
        }
    }

    /// All ranges are in use: a user with more of them than this one gives up those of its largest process. They can be
    /// written again after a rest.
    fn make_room(&mut self, user: u32) {
        let mut users: HashMap<u32, u64> = HashMap::new();
        for process in self.processes.values() {
            *users.entry(process.user).or_default() += u64::from(process.ranges);
        }
        let own = users.get(&user).copied().unwrap_or(0);
        let Some((&most, _)) = users.iter().filter(|(_, ranges)| **ranges > own).max_by_key(|(_, ranges)| **ranges)
        else {
            return;
        };
        let of_most = self.processes.iter_mut().filter(|(_, process)| process.user == most);
        if let Some((&pid, process)) = of_most.max_by_key(|(_, process)| process.ranges) {
            (process.ranges, process.mapped) = (0, 0);
            process.rests_until = Some(Instant::now() + LONG_REST);
            self.maps.remove_space(pid);
            self.left.notes.insert(format!(
                "pid {pid} (user {most}): native stacks of it are missing: others need the room of its address space"
            ));
        }
    }
}
