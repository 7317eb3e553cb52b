//! Waiting for pages and files that do not arrive: by process, by file system, and by user.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::{Duration, Instant};

use super::user_of;
use crate::remote::RemoteProcess;
use crate::types::Pid;

/// How long one process, or one mounted file system, may make the profiler wait: this much at once, plus 1/16 of the time.
const ONE: Allowance = Allowance { at_once: Duration::from_secs(1), share: 16 };
/// How long all of one user may.
const USER: Allowance = Allowance { at_once: Duration::from_secs(4), share: 8 };

/// Most debtors that are tracked; beyond that, those that cost least are forgotten.
const MAX_ENTRIES: usize = 4096;
/// Most reads for one user that may hang at a time.
const MAX_HANGING: u32 = 8;

#[derive(Clone, Copy, Debug)]
struct Allowance {
    at_once: Duration,
    /// Share of the time since then, as one part in so many.
    share: u32,
}

impl Allowance {
    fn after(self, time: Duration) -> Duration {
        self.at_once + time / self.share
    }
}

/// Who is charged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::remote) enum Debtor {
    /// A process, for its memory and for what `/proc` says about it.
    Process(Pid),
    /// A process, for the files at paths of its own root directory.
    Paths(Pid),
    /// A file system that is not this machine's own, by its device number, for all files in it.
    FileSystem(u64),
}

/// What is known about a debtor.
#[derive(Debug)]
struct Account {
    user: u32,
    /// The process through which it was met, and when that started: the pid may belong to another by now.
    pid: Pid,
    start_ticks: u64,
    waited: Duration,
    /// A read for it has not returned so far.
    hangs: bool,
    told_at: Option<Instant>,
}

/// All accounts.
#[derive(Debug)]
pub(in crate::remote) struct Waits {
    since: Instant,
    accounts: HashMap<Debtor, Account>,
    users: HashMap<u32, Total>,
}

#[derive(Debug, Default)]
struct Total {
    waited: Duration,
    hanging: u32,
}

impl Waits {
    pub(in crate::remote) fn new() -> Self {
        Self { since: Instant::now(), accounts: HashMap::new(), users: HashMap::new() }
    }

    /// Whether a read may be begun.
    pub(in crate::remote) fn may(&mut self, debtor: Debtor) -> bool {
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

    /// How much longer to wait for a read that has already used up its time: `usual`, or hardly any time for a user who
    /// has made the profiler wait too often.
    pub(in crate::remote) fn patience(&mut self, debtor: Debtor, pid: Pid, usual: Duration) -> Duration {
        let time = self.since.elapsed();
        let user = self.account(debtor, pid).user;
        let spent = self.users.get(&user).is_some_and(|user| user.waited >= USER.after(time));
        if spent { Duration::ZERO } else { usual }
    }

    /// A read was waited for, and returned.
    pub(in crate::remote) fn waited(&mut self, debtor: Debtor, pid: Pid, wait: Duration) {
        let account = self.account(debtor, pid);
        account.waited += wait;
        let user = account.user;
        self.users.entry(user).or_default().waited += wait;
    }

    /// A read was given up after waiting this long.
    pub(in crate::remote) fn given_up(&mut self, debtor: Debtor, pid: Pid, wait: Duration) {
        let account = self.account(debtor, pid);
        account.waited += wait;
        account.hangs = true;
        account.told_at = Some(Instant::now());
        let user = account.user;
        let total = self.users.entry(user).or_default();
        (total.waited, total.hanging) = (total.waited + wait, total.hanging + 1);
    }

    /// A read that was given up has returned after all.
    pub(in crate::remote) fn came(&mut self, debtor: Debtor) {
        let Some(account) = self.accounts.get_mut(&debtor) else { return };
        if std::mem::take(&mut account.hangs)
            && let Some(user) = self.users.get_mut(&account.user)
        {
            user.hanging = user.hanging.saturating_sub(1);
        }
    }

    /// What was refused since then, in words.
    pub(in crate::remote) fn refused(&self, since: Instant) -> Vec<String> {
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
                user: user_of(pid.0),
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

/// When a process started; 0 if it is gone.
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
        let (mut waits, start) = (Waits::new(), Instant::now());
        assert!(waits.may(debtor));
        assert!(waits.refused(start).is_empty());
        waits.given_up(debtor, pid, Duration::from_millis(100));
        assert!(!waits.may(debtor));
        assert!(waits.refused(start)[0].contains(&format!("pid {pid} ")), "{:?}", waits.refused(start));
        assert!(waits.may(Debtor::FileSystem(1)), "others are not");
        waits.came(debtor);
        assert!(waits.may(debtor));
    }

    #[test]
    fn slow_answers_are_an_allowance() {
        let (debtor, pid) = myself();
        let mut waits = Waits::new();
        waits.waited(debtor, pid, Duration::from_millis(900));
        assert!(waits.may(debtor));
        waits.waited(debtor, pid, Duration::from_millis(900));
        assert!(!waits.may(debtor));
        waits.since -= Duration::from_secs(60);
        assert!(waits.may(debtor), "it grows with time");
    }

    #[test]
    fn a_user_has_one_for_all() {
        let (_, pid) = myself();
        let mut waits = Waits::new();
        let usual = Duration::from_millis(100);
        assert_eq!(waits.patience(Debtor::FileSystem(99), pid, usual), usual);
        for device in 0..8 {
            waits.given_up(Debtor::FileSystem(device), pid, Duration::from_millis(600));
        }
        assert_eq!(waits.patience(Debtor::FileSystem(99), pid, usual), Duration::ZERO);
        assert!(!waits.may(Debtor::FileSystem(99)), "as many hang as may");
    }

    #[test]
    fn a_reused_pid_is_somebody_else() {
        let (debtor, pid) = myself();
        let mut waits = Waits::new();
        waits.given_up(debtor, pid, Duration::from_secs(5));
        waits.accounts.get_mut(&debtor).expect("it has one").start_ticks -= 1;
        assert!(waits.may(debtor));
    }

    #[test]
    fn there_are_never_more_accounts_than_that() {
        let (_, pid) = myself();
        let mut waits = Waits::new();
        for device in 0..2 * MAX_ENTRIES as u64 {
            waits.waited(Debtor::FileSystem(device), pid, Duration::from_millis(device));
            assert!(waits.accounts.len() <= MAX_ENTRIES);
        }
    }
}
