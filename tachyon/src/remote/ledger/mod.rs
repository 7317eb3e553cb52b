//! What processes and their users cost the profiler, and how much they may: the one place that all readers of what others
//! have made draw on.
//!
//! Waiting (`waits`): pages and files that do not come. Work ([`Debts`]): time spent for somebody, of which each kind has an
//! allowance at once and a share of all time, for a process and for all of a user. Memory ([`stock`]): bytes that are kept of
//! somebody. Whoever reads, computes or keeps something for a process charges it here, and asks before. An allowance grows with
//! time, so that a recording of days does not run out of it, and what is refused is told by name. `docs/limits.md` has the table.

pub mod stock;
mod user;
mod waits;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::time::{ClockId, clock_gettime};

pub use user::{owner_of, user_of};
pub(super) use waits::{Debtor, Waits};

use super::{End, RemoteProcess};
use crate::types::Pid;

/// What time is spent on for somebody.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// Finding out what a process is: its mappings, and what files hold.
    Look,
    /// Unwind tables of its files, and which files there are.
    Tables,
    /// Checksums of debug files that have no build id.
    Checksums,
    /// Symbol tables and DWARF of its files.
    Symbols,
    /// Names of its code objects and threads that the kernel side could not copy, read from its memory.
    Names,
    /// What its asyncio tasks await, read from its memory again and again.
    Tasks,
}

/// What may be spent: this at once, and a share of the time.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    at_once: Duration,
    share: f64,
}

const fn allowance(at_once_ms: u64, share: f64) -> Allowance {
    Allowance { at_once: Duration::from_millis(at_once_ms), share }
}

/// The same for work that takes so many times as long in a build that is not optimised.
const fn of_work(at_once_ms: u64, share: f64) -> Allowance {
    const SLOWER: u64 = if cfg!(debug_assertions) { 5 } else { 1 };
    allowance(at_once_ms * SLOWER, share)
}

impl Work {
    /// What one process may cost, and all of one user.
    const fn allowances(self) -> (Allowance, Allowance) {
        match self {
            Self::Look => (allowance(20, 0.05), allowance(200, 0.3)),
            // PyTorch with all its libraries takes some 1.5 s.
            Self::Tables => (of_work(3_000, 0.05), of_work(8_000, 0.2)),
            Self::Checksums => (of_work(300, 0.01), of_work(1_000, 0.02)),
            Self::Symbols => (of_work(3_000, 0.05), of_work(6_000, 0.1)),
            Self::Names => (of_work(300, 0.05), of_work(1_000, 0.1)),
            // More than all looks of one recording may take.
            Self::Tasks => (of_work(500, 0.02), of_work(1_000, 0.05)),
        }
    }

    /// What is done without when it is refused.
    const fn refused(self) -> &'static str {
        match self {
            Self::Look => "it is looked at less often than it changes",
            Self::Tables => "its files take too long: unwind tables of some are not made",
            Self::Checksums => "its debug files take too long: some are not used",
            Self::Symbols => "symbols of its files take too long: functions of some have no names",
            Self::Names => "names that have to be read from its memory take too long: some are missing",
            Self::Tasks => "its asyncio tasks take too long to read: some of what they await is missing",
        }
    }
}

/// What was spent, as far as it is not worn off.
#[derive(Clone, Copy, Debug)]
struct Debt {
    spent: Duration,
    at: Instant,
}

impl Debt {
    const fn none(now: Instant) -> Self {
        Self { spent: Duration::ZERO, at: now }
    }

    fn left(&self, allowance: Allowance, now: Instant) -> Duration {
        self.spent.saturating_sub(now.saturating_duration_since(self.at).mul_f64(allowance.share))
    }

    fn add(&mut self, took: Duration, allowance: Allowance, now: Instant) {
        *self = Self { spent: self.left(allowance, now) + took, at: now };
    }

    /// When something may begin that takes no longer than is left at once.
    fn until(&self, allowance: Allowance) -> Instant {
        self.at + self.spent.saturating_sub(allowance.at_once).div_f64(allowance.share)
    }

    fn has_room(&self, allowance: Allowance, cost: Duration, now: Instant) -> bool {
        let left = self.left(allowance, now);
        if cost.is_zero() { left <= allowance.at_once } else { left + cost <= allowance.at_once }
    }
}

/// Debts of more processes than this are looked through for such as are worn off.
const MANY: usize = 1024;
/// Most processes that are told of by name.
const MAX_TOLD: usize = 64;

/// Time spent on one kind of work, by process and by user. Time is handed in, so nothing here needs a clock.
#[derive(Debug)]
pub struct Debts {
    work: Work,
    processes: HashMap<u32, Debt>,
    users: HashMap<u32, Debt>,
}

impl Debts {
    /// Nobody owes anything.
    #[must_use]
    pub fn new(work: Work) -> Self {
        Self { work, processes: HashMap::new(), users: HashMap::new() }
    }

    /// Whether something that may cost so much can be begun for a process of this user.
    #[must_use]
    pub fn may(&self, pid: u32, user: u32, cost: Duration, now: Instant) -> bool {
        self.process_may(pid, cost, now) && self.user_may(user, cost, now)
    }

    /// The same as far as the process is concerned.
    #[must_use]
    pub fn process_may(&self, pid: u32, cost: Duration, now: Instant) -> bool {
        debt_of(&self.processes, pid, now).has_room(self.work.allowances().0, cost, now)
    }

    /// The same as far as the user is.
    #[must_use]
    pub fn user_may(&self, user: u32, cost: Duration, now: Instant) -> bool {
        debt_of(&self.users, user, now).has_room(self.work.allowances().1, cost, now)
    }

    /// When something can be begun again.
    #[must_use]
    pub fn until(&self, pid: u32, user: u32, now: Instant) -> Instant {
        let (of_process, of_user) = self.work.allowances();
        let process = self.processes.get(&pid).map_or(now, |debt| debt.until(of_process));
        process.max(self.users.get(&user).map_or(now, |debt| debt.until(of_user)))
    }

    /// What a user owes: who owes least comes first.
    #[must_use]
    pub fn of_user(&self, user: u32, now: Instant) -> Duration {
        self.users.get(&user).map_or(Duration::ZERO, |debt| debt.left(self.work.allowances().1, now))
    }

    /// It has taken this.
    pub fn spent(&mut self, pid: u32, user: u32, took: Duration, now: Instant) {
        let (of_process, of_user) = self.work.allowances();
        self.processes.entry(pid).or_insert_with(|| Debt::none(now)).add(took, of_process, now);
        self.users.entry(user).or_insert_with(|| Debt::none(now)).add(took, of_user, now);
        if self.processes.len() > MANY {
            self.processes.retain(|_, debt| !debt.left(of_process, now).is_zero());
            self.users.retain(|_, debt| !debt.left(of_user, now).is_zero());
        }
    }

    /// The pid is another process's from now on; what its user has cost stays.
    pub fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }

    /// How many processes owe something.
    #[must_use]
    pub fn len(&self) -> usize {
        self.processes.len()
    }

    /// Whether nobody does.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }
}

fn debt_of(debts: &HashMap<u32, Debt>, whose: u32, now: Instant) -> Debt {
    debts.get(&whose).copied().unwrap_or(Debt::none(now))
}

/// Everything that is charged.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Reads that were waited for.
    pub(super) waits: Waits,
    debts: HashMap<Work, Debts>,
    users: HashMap<u32, (u32, u64)>,
    told: HashMap<(u32, Work), (u32, Instant)>,
    /// Others that were refused, and when the last one was.
    more: Option<(u64, Instant)>,
}

impl Ledger {
    fn new() -> Self {
        Self { waits: Waits::new(), debts: HashMap::new(), users: HashMap::new(), told: HashMap::new(), more: None }
    }

    fn debts(&mut self, work: Work) -> &mut Debts {
        self.debts.entry(work).or_insert_with(|| Debts::new(work))
    }

    /// Whose process it is, as far as it has been asked before.
    fn user(&mut self, pid: Pid) -> u32 {
        let raw = pid.0;
        let start = RemoteProcess::at(pid).stat().map_or(0, |stat| stat.start_ticks);
        match self.users.get(&raw) {
            Some(&(user, at)) if at == start => user,
            known => {
                if known.is_some() {
                    self.debts.values_mut().for_each(|debts| debts.forget(raw));
                }
                let user = user_of(raw);
                if self.users.len() >= 16 * MANY {
                    self.users.clear();
                }
                self.users.insert(raw, (user, start));
                user
            }
        }
    }

    fn tell(&mut self, pid: u32, user: u32, work: Work) {
        let now = Instant::now();
        let full = self.told.len() >= MAX_TOLD;
        match self.told.entry((pid, work)) {
            Entry::Occupied(mut told) => told.get_mut().1 = now,
            Entry::Vacant(free) if !full => drop(free.insert((user, now))),
            Entry::Vacant(_) => self.more = Some((self.more.map_or(1, |(count, _)| count + 1), now)),
        }
    }
}

/// Locks the one ledger of this process.
pub(super) fn open() -> MutexGuard<'static, Ledger> {
    static LEDGER: LazyLock<Mutex<Ledger>> = LazyLock::new(|| Mutex::new(Ledger::new()));
    LEDGER.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Work for a process is put off: who asks for the report is told.
pub fn put_off(work: Work, pid: u32, user: u32) {
    open().tell(pid, user, work);
}

/// Whether work may be done for a process that may take so long; zero: as long as it takes. What is refused is told.
#[must_use]
pub fn may(work: Work, pid: Pid, cost: Duration) -> bool {
    let mut ledger = open();
    let user = ledger.user(pid);
    let may = !End::is_worked_out(cost) && ledger.debts(work).may(pid.0, user, cost, Instant::now());
    if !may {
        ledger.tell(pid.0, user, work);
    }
    may
}

/// Work was done for a process.
pub fn spent(work: Work, pid: Pid, took: Duration) {
    let mut ledger = open();
    let user = ledger.user(pid);
    End::work(took);
    ledger.debts(work).spent(pid.0, user, took, Instant::now());
}

/// What the calling thread's time is spent on, until this is dropped.
#[derive(Debug)]
pub struct Charged {
    work: Work,
    pid: Pid,
    begun: Duration,
}

/// From now on, until what is returned is dropped, the calling thread works for a process.
#[must_use]
pub fn charge(work: Work, pid: Pid) -> Charged {
    Charged { work, pid, begun: thread_time() }
}

impl Charged {
    /// What it has come to so far.
    #[must_use]
    pub fn so_far(&self) -> Duration {
        thread_time().saturating_sub(self.begun)
    }
}

impl Drop for Charged {
    fn drop(&mut self) {
        let took = self.so_far();
        if took >= FREE {
            spent(self.work, self.pid, took);
        }
    }
}

/// What took less is not charged to anybody: a look into tables that are there.
const FREE: Duration = Duration::from_micros(100);

/// CPU time of the calling thread: waiting for a processor is nobody's fault, and waiting for a file is charged elsewhere.
#[must_use]
pub fn thread_time() -> Duration {
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).unwrap_or_default()
}

/// What was refused since then, in words.
#[must_use]
pub fn refused(since: Instant) -> Vec<String> {
    let ledger = open();
    let mut notes = ledger.waits.refused(since);
    let told = ledger.told.iter().filter(|(_, (_, at))| *at >= since);
    notes.extend(told.map(|((pid, work), (user, _))| format!("pid {pid} (user {user}): {}", work.refused())));
    notes.sort();
    if let Some((count, _)) = ledger.more.filter(|(_, at)| *at >= since) {
        notes.push(format!("{count} times more, processes that are not named here were refused for what they cost"));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn what_may_be_spent_grows_with_time() {
        let (mut debts, now) = (Debts::new(Work::Look), Instant::now());
        assert!(debts.may(1, 7, 20 * MS, now) && !debts.may(1, 7, 300 * MS, now), "more than it may have at once");
        debts.spent(1, 7, 120 * MS, now);
        assert!(!debts.may(1, 7, Duration::ZERO, now));
        // Of 120 ms 20 may be left; a twentieth wears off.
        assert_eq!(debts.until(1, 7, now), now + 2_000 * MS);
        assert!(debts.may(1, 7, Duration::ZERO, now + 2_001 * MS));
        assert!(debts.may(2, 7, Duration::ZERO, now), "another process of this user");
        debts.spent(2, 7, 120 * MS, now);
        assert!(!debts.may(3, 7, Duration::ZERO, now), "all of his have cost too much");
        assert!(debts.may(4, 8, Duration::ZERO, now), "others have their own");
    }

    #[test]
    fn who_is_refused_is_named() {
        let start = Instant::now();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("it runs");
        let pid = Pid(child.id());
        assert!(may(Work::Checksums, pid, Duration::ZERO));
        assert!(!may(Work::Checksums, pid, Duration::from_secs(100)));
        let told = refused(start);
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        let beginning = format!("pid {pid} (user ");
        assert!(told.iter().any(|note| note.starts_with(&beginning) && note.contains("debug files")), "{told:?}");
    }
}
