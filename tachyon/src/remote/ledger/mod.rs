//! What processes and their users cost the profiler, and how much they may cost: the one place that all readers of
//! untrusted data account to.
//!
//! Waiting (`waits`): pages and files that do not arrive. Work ([`Debts`]): time spent on behalf of a process; each kind has an
//! allowance at once and a share of all time, per process and per user. Memory ([`stock`]): bytes that are kept for a process.
//! Code that reads, computes or keeps something for a process asks here first and charges it afterwards. An allowance grows with
//! time, so that a recording of days does not exhaust it, and refusals are reported by name. `docs/limits.md` has the table.

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

/// Kinds of work that time is spent on for a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Work {
    /// Finding out what a process is: its mappings, and what files hold.
    Look,
    /// Unwind tables of its files, and finding those files.
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

/// What may be spent: this much at once, plus a share of the time.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    at_once: Duration,
    share: f64,
}

const fn allowance(at_once_ms: u64, share: f64) -> Allowance {
    Allowance { at_once: Duration::from_millis(at_once_ms), share }
}

/// The same for work, which takes several times as long in an unoptimised build.
const fn of_work(at_once_ms: u64, share: f64) -> Allowance {
    const SLOWER: u64 = if cfg!(debug_assertions) { 5 } else { 1 };
    allowance(at_once_ms * SLOWER, share)
}

impl Work {
    /// What one process may cost, and what all processes of one user may.
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

    /// What is missing when it is refused.
    const fn refused(self) -> &'static str {
        match self {
            Self::Look => "it is looked at less often than it changes",
            Self::Tables => "its files take too long: unwind tables of some are not made",
            Self::Checksums => "its debug files take too long: some are not used",
            Self::Symbols => "symbols of its files take too long: functions of some have no names",
            Self::Names => "names that have to be read from its memory take too long: some are missing",
            Self::Tasks => {
                "its asyncio tasks or greenlets take too long to read: some of what they wait for is missing"
            }
        }
    }
}

/// What was spent and has not worn off yet.
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

    /// When work may begin that takes no longer than what is then left at once.
    fn until(&self, allowance: Allowance) -> Instant {
        self.at + self.spent.saturating_sub(allowance.at_once).div_f64(allowance.share)
    }

    fn has_room(&self, allowance: Allowance, cost: Duration, now: Instant) -> bool {
        let left = self.left(allowance, now);
        if cost.is_zero() { left <= allowance.at_once } else { left + cost <= allowance.at_once }
    }
}

/// With debts of more processes than this, those that have worn off are removed.
const MANY: usize = 1024;
/// Most processes that are reported by name.
const MAX_TOLD: usize = 64;

/// Time spent on one kind of work, by process and by user. The time is passed in, so nothing here needs a clock.
#[derive(Debug)]
pub struct Debts {
    work: Work,
    processes: HashMap<u32, Debt>,
    users: HashMap<u32, Debt>,
}

impl Debts {
    /// Starts without any debts.
    #[must_use]
    pub fn new(work: Work) -> Self {
        Self { work, processes: HashMap::new(), users: HashMap::new() }
    }

    /// Whether work that may cost this much can be begun for a process of this user.
    #[must_use]
    pub fn may(&self, pid: u32, user: u32, cost: Duration, now: Instant) -> bool {
        self.process_may(pid, cost, now) && self.user_may(user, cost, now)
    }

    /// The same, considering only the process.
    #[must_use]
    pub fn process_may(&self, pid: u32, cost: Duration, now: Instant) -> bool {
        debt_of(&self.processes, pid, now).has_room(self.work.allowances().0, cost, now)
    }

    /// The same, considering only the user.
    #[must_use]
    pub fn user_may(&self, user: u32, cost: Duration, now: Instant) -> bool {
        debt_of(&self.users, user, now).has_room(self.work.allowances().1, cost, now)
    }

    /// When work can be begun again.
    #[must_use]
    pub fn until(&self, pid: u32, user: u32, now: Instant) -> Instant {
        let (of_process, of_user) = self.work.allowances();
        let process = self.processes.get(&pid).map_or(now, |debt| debt.until(of_process));
        process.max(self.users.get(&user).map_or(now, |debt| debt.until(of_user)))
    }

    /// What a user owes: the one who owes least comes first.
    #[must_use]
    pub fn of_user(&self, user: u32, now: Instant) -> Duration {
        self.users.get(&user).map_or(Duration::ZERO, |debt| debt.left(self.work.allowances().1, now))
    }

    /// Records that work has taken this long.
    pub fn spent(&mut self, pid: u32, user: u32, took: Duration, now: Instant) {
        let (of_process, of_user) = self.work.allowances();
        self.processes.entry(pid).or_insert_with(|| Debt::none(now)).add(took, of_process, now);
        self.users.entry(user).or_insert_with(|| Debt::none(now)).add(took, of_user, now);
        if self.processes.len() > MANY {
            self.processes.retain(|_, debt| !debt.left(of_process, now).is_zero());
            self.users.retain(|_, debt| !debt.left(of_user, now).is_zero());
        }
    }

    /// From now on the pid belongs to another process; what its user has cost stays.
    pub fn forget(&mut self, pid: u32) {
        self.processes.remove(&pid);
    }

    /// How many processes owe something.
    #[must_use]
    pub fn len(&self) -> usize {
        self.processes.len()
    }

    /// Whether no process does.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.processes.is_empty()
    }
}

fn debt_of(debts: &HashMap<u32, Debt>, whose: u32, now: Instant) -> Debt {
    debts.get(&whose).copied().unwrap_or(Debt::none(now))
}

/// How long a pid is taken to be the same process's: far shorter than it takes until all pids were used.
const SAME: Duration = Duration::from_millis(50);

/// Whose a process is.
#[derive(Clone, Copy, Debug)]
struct User {
    user: u32,
    /// When the process started, which distinguishes it from others with its pid.
    start: u64,
    /// When that was last looked at.
    seen: Instant,
}

/// Everything that is charged.
#[derive(Debug)]
pub(super) struct Ledger {
    /// Time spent waiting for reads.
    pub(super) waits: Waits,
    debts: HashMap<Work, Debts>,
    users: HashMap<u32, User>,
    told: HashMap<(u32, Work), (u32, Instant)>,
    /// How many others were refused, and when the last one was.
    more: Option<(u64, Instant)>,
}

impl Ledger {
    fn new() -> Self {
        Self { waits: Waits::new(), debts: HashMap::new(), users: HashMap::new(), told: HashMap::new(), more: None }
    }

    fn debts(&mut self, work: Work) -> &mut Debts {
        self.debts.entry(work).or_insert_with(|| Debts::new(work))
    }

    /// The user of a process, looked up once.
    fn user(&mut self, pid: Pid) -> u32 {
        let (raw, now) = (pid.0, Instant::now());
        let known = self.users.get(&raw).copied();
        if let Some(known) = known.filter(|known| now.duration_since(known.seen) < SAME) {
            return known.user;
        }
        let start = RemoteProcess::at(pid).stat().map_or(0, |stat| stat.start_ticks);
        let user = match known {
            Some(known) if known.start == start => known.user,
            _ => {
                if known.is_some() {
                    self.debts.values_mut().for_each(|debts| debts.forget(raw));
                }
                if self.users.len() >= 16 * MANY {
                    self.users.clear();
                }
                user_of(raw)
            }
        };
        self.users.insert(raw, User { user, start, seen: now });
        user
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

/// Notes that work for a process is put off, for the report.
pub fn put_off(work: Work, pid: u32, user: u32) {
    open().tell(pid, user, work);
}

/// Whether work that may take this long may be done for a process; zero: however long it takes. Refusals are noted for
/// the report.
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

/// Charges the calling thread's time until this is dropped.
#[derive(Debug)]
pub struct Charged {
    work: Work,
    pid: Pid,
    begun: Duration,
}

/// The calling thread works for a process from now on, until the returned value is dropped.
#[must_use]
pub fn charge(work: Work, pid: Pid) -> Charged {
    Charged { work, pid, begun: thread_time() }
}

impl Charged {
    /// The time charged so far.
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

/// Work that took less is not charged, such as a lookup in existing tables.
const FREE: Duration = Duration::from_micros(100);

/// CPU time of the calling thread: time spent waiting for a CPU is not charged, and waiting for a file is charged elsewhere.
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
        // Of 120 ms, 20 may remain; a twentieth of the time wears off.
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
