//! Which process is looked at next.
//!
//! A look reads all mappings of a process, and the process decides how long that takes: it may have any number of mappings,
//! and may map another file each millisecond. So looks are queued rather than made at once: several for one process become
//! one, users take turns, and a user that has cost much waits until the debt has worn off. The time is passed in, so nothing
//! here needs a clock.

use crate::remote::ledger::{Debts, Work};
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::{Duration, Instant};

/// The looks that are asked for.
#[derive(Debug)]
pub(super) struct Queue {
    /// Processes that wait, by user, in the order in which looks were requested.
    waiting: BTreeMap<u32, VecDeque<u32>>,
    /// The user of each process that waits.
    user_of: HashMap<u32, u32>,
    debts: Debts,
    /// The user whose turn was last.
    last: u32,
}

impl Default for Queue {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), user_of: HashMap::new(), debts: Debts::new(Work::Look), last: 0 }
    }
}

impl Queue {
    /// Whether a look at this process is already pending.
    pub fn has(&self, pid: u32) -> bool {
        self.user_of.contains_key(&pid)
    }

    /// Asks for a look at a process of this user.
    pub fn ask(&mut self, pid: u32, user: u32) {
        if !self.has(pid) {
            self.user_of.insert(pid, user);
            self.waiting.entry(user).or_default().push_back(pid);
        }
    }

    /// Drops the request for a look; the pid may go to another process next.
    pub fn forget(&mut self, pid: u32) {
        self.debts.forget(pid);
        let Some(user) = self.user_of.remove(&pid) else { return };
        if let Some(waiting) = self.waiting.get_mut(&user) {
            waiting.retain(|&other| other != pid);
        }
    }

    /// Whether a process of this user may be looked at now, without waiting for its turn.
    pub fn may(&self, pid: u32, user: u32, now: Instant) -> bool {
        self.debts.may(pid, user, Duration::ZERO, now)
    }

    /// Takes the process whose turn it is: users one after another, and of each user the first process that may be
    /// looked at.
    pub fn next(&mut self, now: Instant) -> Option<(u32, u32)> {
        let after = self.waiting.range(self.last.saturating_add(1)..).chain(self.waiting.range(..=self.last));
        let (user, index) =
            after.filter(|(user, _)| self.debts.user_may(**user, Duration::ZERO, now)).find_map(|(&user, pids)| {
                Some((user, pids.iter().position(|&pid| self.debts.process_may(pid, Duration::ZERO, now))?))
            })?;
        self.last = user;
        let waiting = self.waiting.get_mut(&user)?;
        let pid = waiting.remove(index)?;
        if waiting.is_empty() {
            self.waiting.remove(&user);
        }
        self.user_of.remove(&pid);
        Some((pid, user))
    }

    /// Records what a look has cost.
    pub fn spent(&mut self, pid: u32, user: u32, took: Duration, now: Instant) {
        self.debts.spent(pid, user, took, now);
    }

    /// How long until the next turn; `None` when nothing waits.
    pub fn wait(&self, now: Instant) -> Option<Duration> {
        let until = self.user_of.iter().map(|(&pid, &user)| self.debts.until(pid, user, now));
        until.min().map(|until| until.saturating_duration_since(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn users_take_turns() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        for pid in 1..=5 {
            queue.ask(pid, 1000);
            queue.ask(pid, 1000);
        }
        queue.ask(10, 0);
        queue.ask(20, 2000);
        let mut order = Vec::new();
        while let Some((pid, _)) = queue.next(now) {
            order.push(pid);
        }
        assert_eq!(order, [1, 20, 10, 2, 3, 4, 5], "one that maps a lot keeps nobody waiting");
        assert_eq!(queue.wait(now), None);
    }

    /// One process maps another file each millisecond, and a look at its mappings takes ten.
    #[test]
    fn a_storm_has_its_share() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let (mut now, mut storm, mut honest) = (start, Duration::ZERO, Vec::new());
        for step in 0..10_000_u32 {
            queue.ask(1, 1000);
            if step % 1000 == 500 {
                // Of the same user.
                queue.ask(100 + step, 1000);
            }
            match queue.next(now) {
                Some((1, user)) => {
                    (now, storm) = (now + 10 * MS, storm + 10 * MS);
                    queue.spent(1, user, 10 * MS, now);
                }
                Some((pid, user)) => {
                    honest.push(pid);
                    now += MS;
                    queue.spent(pid, user, MS, now);
                }
                None => now += MS,
            }
        }
        let share = storm.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.04..0.06).contains(&share), "{share}");
        assert_eq!(honest.len(), 10, "those beside it are looked at");
    }

    #[test]
    fn many_processes_of_a_user_are_one() {
        let (mut queue, start) = (Queue::default(), Instant::now());
        let (mut now, mut spent) = (start, Duration::ZERO);
        for pid in 0..5_000 {
            queue.ask(pid, 1000);
            while let Some((pid, user)) = queue.next(now) {
                (now, spent) = (now + 5 * MS, spent + 5 * MS);
                queue.spent(pid, user, 5 * MS, now);
            }
            now += MS;
        }
        let share = spent.as_secs_f64() / (now - start).as_secs_f64();
        assert!((0.25..0.36).contains(&share), "{share}");
        assert!(queue.may(9_999, 0, now), "another user does not wait");
        assert!(queue.debts.len() <= 1025);
        let wait = queue.wait(now).expect("some wait");
        assert!(queue.next(now + wait + MS).is_some(), "and they are told when it is their turn");
    }

    #[test]
    fn the_dead_do_not_wait() {
        let (mut queue, now) = (Queue::default(), Instant::now());
        queue.ask(1, 0);
        queue.spent(1, 0, Duration::from_secs(1), now);
        assert!(!queue.may(1, 0, now));
        queue.forget(1);
        assert!(!queue.has(1) && queue.wait(now).is_none());
        assert!(queue.debts.is_empty(), "the next process of that number has debts of its own");
    }
}
