//! Turns tasks and greenlets that wait side by side while their event loop is idle into samples.

use super::super::made::{PerProcess, describe};
use super::super::task_waits::{IdleLoop, LookedTasks, TaskWaits};
use super::Maker;
use crate::merge::{COROUTINES_CUT, GREENLET_CUT, Owner, ProgramKey, TASKS_CUT};
use crate::profile::{FrameId, Library, Merge, Profile, Sample, TASK_WAIT, event_root, library};
use crate::snapshot::AsyncTask;
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use tachyon_common::event::{SampleRecord, status};
use tachyon_common::whose::MAX_AWAITING;

/// Most frames of all stacks of a loop at one look. Frames that are below many tasks, of which a program can have as many as it likes,
/// count once for each.
const MOST_FRAMES: usize = 1 << 18;

impl Maker {
    /// Makes samples of what a look has found.
    pub(super) fn task_waits(&mut self, waits: &TaskWaits) {
        let tasks = &mut self.made.waited.tasks;
        tasks.idle += waits.idle.iter().map(|idle| idle.weight).chain(waits.not_read.values().copied()).sum::<u64>();
        for (&reason, &ticks) in &waits.not_read {
            *tasks.not_read.entry(reason).or_default() += ticks;
        }
        for idle in &waits.idle {
            self.idle_loop(idle, waits.at.as_micros());
        }
        if self.made.first_error.is_some() {
            self.live.failed.store(true, Ordering::Relaxed);
        }
    }

    fn idle_loop(&mut self, idle: &IdleLoop, time_us: u64) {
        let owner = self.owner_of_loop(idle);
        let tells_work = self.made.sink.as_ref().is_some_and(|sink| sink.tells_work());
        let root = self.made.profile.special_frame(&event_root(TASK_WAIT));
        let (of, main) = (&idle.of, if idle.tid == idle.of.pid { status::MAIN_THREAD } else { 0 });
        let tasks = &of.tasks.tasks;
        let (mut stack, mut frames_left) = (Vec::new(), MOST_FRAMES);
        let mut known: HashMap<FrameId, FrameId, RandomState> = HashMap::default();
        for chain in chains(tasks, idle.event_loop) {
            let shown = chain.tasks.iter().take(1 + MAX_AWAITING);
            let frames: usize = shown.map(|&at| 1 + tasks[at].frames.len()).sum();
            let Some(left) = frames_left.checked_sub(frames) else {
                self.made.waited.tasks.too_many += idle.weight;
                continue;
            };
            frames_left = left;
            stack.clear();
            // The task's own work, and the frame where users look for its wait.
            let (mut whose, mut charged) = (None, root);
            for (number, &at) in chain.tasks.iter().take(1 + MAX_AWAITING).enumerate() {
                let task = &tasks[at];
                if !task.whole && !task.greenlet {
                    stack.push(self.made.profile.special_frame(COROUTINES_CUT));
                }
                let above = stack.len();
                let profile = &mut self.made.profile;
                let mut own = |frame| *known.entry(frame).or_insert_with(|| profile.adopt_frame(&of.profile, frame));
                stack.extend(task.frames.iter().map(|&frame| own(frame)));
                if !task.whole && task.greenlet {
                    stack.push(self.made.profile.special_frame(GREENLET_CUT));
                }
                let (work, frame) = self.tasks.of_outside(&mut self.made.profile, owner.process, task);
                stack.push(frame);
                if number == 0 {
                    (whose, charged) = (work, place_of(&self.made.profile, &stack[above..]));
                }
            }
            if chain.is_cut() {
                stack.push(self.made.profile.special_frame(TASKS_CUT));
            }
            stack.push(root);
            let sample = Sample {
                thread: owner.thread,
                time_us,
                status: main as u8,
                frames: &stack,
                merge: Merge::None,
                work: whose.filter(|_| tells_work),
            };
            let is_greenlet = chain.tasks.first().is_some_and(|&at| tasks[at].greenlet);
            self.made.task_wait(&sample, charged, idle.weight, is_greenlet);
        }
    }

    /// The loop's thread and process in the profile, which may not have them yet.
    fn owner_of_loop(&mut self, idle: &IdleLoop) -> Owner {
        let LookedTasks { key, pid, tasks, threads, .. } = &*idle.of;
        let (event_loop, thread, mut comm) = (&tasks.loops[idle.event_loop], threads.get(&idle.tid), [0; 16]);
        let name = thread.map_or("", |thread| &thread.comm);
        comm.iter_mut().zip(name.bytes().take(15)).for_each(|(to, from)| *to = from);
        let record = SampleRecord {
            instance: key.instance,
            image: key.image,
            tgid: *pid,
            tid: idle.tid,
            ns_tid: thread.map_or(idle.tid, |thread| thread.ns_tid),
            tstate: event_loop.tstate,
            interp_id: event_loop.interpreter.map_or(0, u64::cast_signed),
            comm,
            ..SampleRecord::default()
        };
        let (made, registry) = (&mut self.made, &self.registry);
        let owner = self.merger.owner(&mut made.profile, &record, || describe(registry, &record));
        if owner.first {
            made.processes.push(PerProcess { program: ProgramKey::of(&record), ..PerProcess::default() });
        }
        if owner.nameless {
            self.names.expect(owner.thread, &record);
        }
        owner
    }
}

/// A task, the one that awaits it, the one that awaits that, and so on: indices.
struct ChainOfTasks {
    tasks: Vec<usize>,
    /// The last one is awaited by one that is already in the chain.
    circle: bool,
}

impl ChainOfTasks {
    /// Whether a stack does not have all of it.
    fn is_cut(&self) -> bool {
        self.circle || self.tasks.len() > 1 + MAX_AWAITING
    }
}

/// The stacks of a loop's tasks: one for each task that awaits none, down to one that no task awaits; if several await one, that at
/// the lowest address is taken. Tasks that are in none of these have stacks of their own.
fn chains(tasks: &[AsyncTask], event_loop: usize) -> Vec<ChainOfTasks> {
    let places: HashMap<u64, usize> = tasks.iter().enumerate().map(|(at, task)| (task.address, at)).collect();
    let awaits_one: HashSet<u64> = tasks.iter().flat_map(|task| &task.awaited_by).copied().collect();
    let chain = |first: usize| {
        let mut chain = ChainOfTasks { tasks: vec![first], circle: false };
        let mut at = first;
        while let Some(&next) =
            tasks[at].awaited_by.iter().filter_map(|address| places.get(address)).min_by_key(|&&at| tasks[at].address)
        {
            if chain.tasks.contains(&next) {
                chain.circle = true;
                break;
            }
            // One more than there is room for shows that there are more.
            if chain.tasks.len() > 1 + MAX_AWAITING {
                break;
            }
            chain.tasks.push(next);
            at = next;
        }
        chain
    };
    let own = |at: &usize| tasks[*at].event_loop == event_loop && !tasks[*at].running;
    let (leaves, others): (Vec<usize>, Vec<usize>) =
        (0..tasks.len()).filter(own).partition(|&at| !awaits_one.contains(&tasks[at].address));
    let (mut shown, mut found) = (HashSet::new(), Vec::new());
    for first in leaves.into_iter().chain(others) {
        let is_leaf = !awaits_one.contains(&tasks[first].address);
        if !is_leaf && shown.contains(&first) {
            continue;
        }
        let chain = chain(first);
        shown.extend(chain.tasks.iter().take(1 + MAX_AWAITING).copied());
        found.push(chain);
    }
    found
}

/// Where users look for a wait: the innermost frame of the program's own, else of a library, else the innermost one.
fn place_of(profile: &Profile, stack: &[FrameId]) -> FrameId {
    let is = |wanted: fn(Option<Library<'_>>) -> bool| {
        let of = |frame: &&FrameId| wanted(library(profile.strings.get(profile.frames.get(**frame).filename)));
        // The task itself comes last.
        stack[..stack.len() - 1].iter().find(of).copied()
    };
    let own = is(|library| library.is_none());
    own.or_else(|| is(|library| matches!(library, Some(Library::Site { .. })))).unwrap_or(stack[0])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Frame;

    fn task(address: u64, awaited_by: &[u64]) -> AsyncTask {
        AsyncTask { address, awaited_by: awaited_by.to_vec(), ..AsyncTask::default() }
    }

    fn chains_of(tasks: &[AsyncTask]) -> Vec<(Vec<u64>, bool)> {
        let told = |chain: ChainOfTasks| (chain.tasks.iter().map(|&at| tasks[at].address).collect(), chain.is_cut());
        chains(tasks, 0).into_iter().map(told).collect()
    }

    #[test]
    fn each_task_is_in_a_stack() {
        // 3 and 4 are awaited by 2, and that by 1; 5 is awaited by 1 and 6; 7 and 8 await each other; 9 is in another loop.
        let other = AsyncTask { event_loop: 1, ..task(9, &[]) };
        let running = AsyncTask { running: true, ..task(10, &[]) };
        let tasks = [
            task(1, &[]),
            task(2, &[1]),
            task(3, &[2]),
            task(4, &[2]),
            task(5, &[6, 1]),
            task(6, &[]),
            task(7, &[8]),
            task(8, &[7]),
            other,
            running,
        ];
        assert_eq!(
            chains_of(&tasks),
            [(vec![3, 2, 1], false), (vec![4, 2, 1], false), (vec![5, 1], false), (vec![6], false), (vec![7, 8], true),]
        );
    }

    #[test]
    fn long_chains_are_cut() {
        let last = MAX_AWAITING as u64 + 3;
        let awaited_by = |address| if address == last { vec![] } else { vec![address + 1] };
        let tasks: Vec<AsyncTask> = (1..=last).map(|address| task(address, &awaited_by(address))).collect();
        let found = chains_of(&tasks);
        // Those without room in the first stack are in one of their own.
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].0[0], found[0].1), (1, true));
        assert_eq!((found[1].0[0], found[1].1), (MAX_AWAITING as u64 + 2, false));
    }

    #[test]
    fn waits_are_charged_to_the_programs_own_code() {
        let mut profile = Profile::default();
        let mut frame = |file: &str| {
            let (file, function) = (profile.strings.intern(file), profile.strings.intern("f"));
            profile.frames.intern(Frame::without_location(file, function))
        };
        let standard = frame("/usr/lib/python3.12/asyncio/tasks.py");
        let library = frame("/usr/lib/python3.12/site-packages/aiohttp/client.py");
        let (own, task) = (frame("/srv/app.py"), frame("<task>"));
        assert_eq!(place_of(&profile, &[standard, library, own, task]), own);
        assert_eq!(place_of(&profile, &[standard, library, task]), library);
        assert_eq!(place_of(&profile, &[standard, task]), standard);
        assert_eq!(place_of(&profile, &[task]), task);
    }
}
