//! What processes and their users cost the profiler, and how much they may.
//!
//! Whoever reads for a process what that process or its user made charges it here. An allowance grows with time, so that a
//! recording of days does not run out of it, and what is refused is told by name.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use super::RemoteProcess;
use crate::types::Pid;

/// What one process, or one mounted file system, may make the profiler wait: this at once, and 1/16 of the time.
const ONE: Allowance = Allowance { at_once: Duration::from_secs(1), share: 16 };
/// What all of one user may.
const USER: Allowance = Allowance { at_once: Duration::from_secs(4), share: 8 };

/// Most that are kept track of; of more, those that cost least are forgotten.
const MAX_ENTRIES: usize = 4096;
/// Most reads of one user's that may be under way without end.
const MAX_HANGING: u32 = 8;

#[derive(Clone, Copy, Debug)]
struct Allowance {
    at_once: Duration,
    /// One part in so many of the time since then.
    share: u32,
}

impl Allowance {
    fn after(self, time: Duration) -> Duration {
        self.at_once + time / self.share
    }
}

/// Who is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Debtor {
    /// A process, for its memory and for what `/proc` says of it.
    Process(Pid),
    /// A process, for the files at paths of its own root directory.
    Paths(Pid),
    /// A file system that is not this machine's own, by its device number, for all files in it.
    FileSystem(u64),
}

/// What is known of a debtor.
#[derive(Debug)]
struct Account {
    user: u32,
    /// The process by which it was met, and when that started: a pid may be another's by now.
    pid: Pid,
    start_ticks: u64,
    waited: Duration,
    /// A read of it never came back so far.
    hangs: bool,
    told_at: Option<Instant>,
}

/// All accounts.
#[derive(Debug)]
pub(super) struct Ledger {
    since: Instant,
    accounts: HashMap<Debtor, Account>,
    users: HashMap<u32, Total>,
}

#[derive(Debug, Default)]
struct Total {
    waited: Duration,
    hanging: u32,
}

impl Ledger {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), accounts: HashMap::new(), users: HashMap::new() }
    }

    /// Whether a read may be begun.
    pub(super) fn may(&mut self, debtor: Debtor) -> bool {
        let time = self.since.elapsed();
        let Some(account) = self.accounts.get_mut(&debtor) else { return true };
        let hanging = self.users.get(&account.user).map_or(0, |user| user.hanging);
        if !account.hangs && account.waited < ONE.after(time) && hanging < MAX_HANGING {
            return true;
        }
        if let Debtor::Process(pid) | Debtor::Paths(pid) = debtor
            && start_of(pid) != account.start_ticks
        {
            self.forget(debtor);
            return true;
        }
        account.told_at = Some(Instant::now());
        false
    }

    /// How much longer a read may be waited for that has already taken its time: `usual`, or hardly any of a user who has
    /// made the profiler wait too often.
    pub(super) fn patience(&mut self, debtor: Debtor, pid: Pid, usual: Duration) -> Duration {
        let time = self.since.elapsed();
        let user = self.account(debtor, pid).user;
        let spent = self.users.get(&user).is_some_and(|user| user.waited >= USER.after(time));
        if spent { Duration::ZERO } else { usual }
    }

    /// A read was waited for, and came.
    pub(super) fn waited(&mut self, debtor: Debtor, pid: Pid, wait: Duration) {
        let account = self.account(debtor, pid);
        account.waited += wait;
        let user = account.user;
        self.users.entry(user).or_default().waited += wait;
    }

    /// A read was given up after so long.
    pub(super) fn given_up(&mut self, debtor: Debtor, pid: Pid, wait: Duration) {
        let account = self.account(debtor, pid);
        account.waited += wait;
        account.hangs = true;
        account.told_at = Some(Instant::now());
        let user = account.user;
        let total = self.users.entry(user).or_default();
        (total.waited, total.hanging) = (total.waited + wait, total.hanging + 1);
    }

    /// A read that was given up has come after all.
    pub(super) fn came(&mut self, debtor: Debtor) {
        let Some(account) = self.accounts.get_mut(&debtor) else { return };
        if std::mem::take(&mut account.hangs)
            && let Some(user) = self.users.get_mut(&account.user)
        {
            user.hanging = user.hanging.saturating_sub(1);
        }
    }

    /// What was refused since then, in words.
    pub(super) fn refused(&self, since: Instant) -> Vec<String> {
        let told = |account: &&Account| account.told_at.is_some_and(|at| at >= since);
        let refused = self.accounts.iter().filter(|(_, account)| told(account));
        let mut notes: Vec<String> = refused
            .map(|(debtor, Account { pid, user, .. })| match debtor {
                Debtor::Process(_) => format!("pid {pid} (user {user}): pages of its memory that do not come are not waited for"),
                Debtor::Paths(_) => {
                    format!("pid {pid} (user {user}): files at paths of it, which do not come, are not waited for")
                }
                Debtor::FileSystem(device) => {
                    let (major, minor) = (libc::major(*device), libc::minor(*device));
                    format!("pid {pid} (user {user}): files of its file system {major}:{minor}, which does not answer, are not waited for")
                }
            })
            .collect();
        notes.sort();
        notes
    }

    fn account(&mut self, debtor: Debtor, pid: Pid) -> &mut Account {
        if self.accounts.len() >= MAX_ENTRIES && !self.accounts.contains_key(&debtor) {
            self.shrink();
        }
        match self.accounts.entry(debtor) {
            Entry::Occupied(account) => account.into_mut(),
            Entry::Vacant(free) => free.insert(Account {
                user: RemoteProcess::at(pid).real_uid().unwrap_or(u32::MAX),
                pid,
                start_ticks: start_of(pid),
                waited: Duration::ZERO,
                hangs: false,
                told_at: None,
            }),
        }
    }

    fn forget(&mut self, debtor: Debtor) {
        self.came(debtor);
        self.accounts.remove(&debtor);
    }

    /// Forgets the half that costs least and does not hang.
    fn shrink(&mut self) {
        let mut waits: Vec<Duration> = self.accounts.values().map(|account| account.waited).collect();
        waits.sort_unstable();
        let median = waits[waits.len() / 2];
        self.accounts.retain(|_, account| account.hangs || account.waited > median);
        if self.accounts.len() >= MAX_ENTRIES {
            self.accounts.clear();
        }
    }
}

/// When a process started; 0 of one that is gone.
fn start_of(pid: Pid) -> u64 {
    RemoteProcess::at(pid).stat().map_or(0, |stat| stat.start_ticks)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn myself() -> (Debtor, Pid) {
        let pid = Pid(std::process::id());
        (Debtor::Process(pid), pid)
    }

    #[test]
    fn what_hangs_is_refused_until_it_comes() {
        let (debtor, pid) = myself();
        let (mut ledger, start) = (Ledger::new(), Instant::now());
        assert!(ledger.may(debtor));
        assert!(ledger.refused(start).is_empty());
        ledger.given_up(debtor, pid, Duration::from_millis(100));
        assert!(!ledger.may(debtor));
        assert!(ledger.refused(start)[0].contains(&format!("pid {pid} ")), "{:?}", ledger.refused(start));
        assert!(ledger.may(Debtor::FileSystem(1)), "others are not");
        ledger.came(debtor);
        assert!(ledger.may(debtor));
    }

    #[test]
    fn slow_answers_are_an_allowance() {
        let (debtor, pid) = myself();
        let mut ledger = Ledger::new();
        ledger.waited(debtor, pid, Duration::from_millis(900));
        assert!(ledger.may(debtor));
        ledger.waited(debtor, pid, Duration::from_millis(900));
        assert!(!ledger.may(debtor));
        ledger.since -= Duration::from_secs(60);
        assert!(ledger.may(debtor), "it grows with time");
    }

    #[test]
    fn a_user_has_one_for_all() {
        let (_, pid) = myself();
        let mut ledger = Ledger::new();
        let usual = Duration::from_millis(100);
        assert_eq!(ledger.patience(Debtor::FileSystem(99), pid, usual), usual);
        for device in 0..8 {
            ledger.given_up(Debtor::FileSystem(device), pid, Duration::from_millis(600));
        }
        assert_eq!(ledger.patience(Debtor::FileSystem(99), pid, usual), Duration::ZERO);
        assert!(!ledger.may(Debtor::FileSystem(99)), "as many hang as may");
    }

    #[test]
    fn a_reused_pid_is_somebody_else() {
        let (debtor, pid) = myself();
        let mut ledger = Ledger::new();
        ledger.given_up(debtor, pid, Duration::from_secs(5));
        ledger.accounts.get_mut(&debtor).expect("it has one").start_ticks -= 1;
        assert!(ledger.may(debtor));
    }

    #[test]
    fn there_are_never_more_accounts_than_that() {
        let (_, pid) = myself();
        let mut ledger = Ledger::new();
        for device in 0..2 * MAX_ENTRIES as u64 {
            ledger.waited(Debtor::FileSystem(device), pid, Duration::from_millis(device));
            assert!(ledger.accounts.len() <= MAX_ENTRIES);
        }
    }
}
