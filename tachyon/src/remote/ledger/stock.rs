//! Bytes that are kept for processes: names, line tables and frames of their code objects.
//!
//! What is known about a program goes when it ends; what its samples refer to stays in the profile until that is written. A
//! process can keep executing other programs, and a user can keep starting processes, so both have a limit on all they leave
//! behind.

use std::collections::HashMap;

/// Bytes of one process, all its programs together. A big program takes a tenth.
const OF_PROCESS: usize = 64 << 20;
/// Bytes of all processes of one user.
const OF_USER: usize = 192 << 20;
/// The shares of `--max-memory` that these may be.
const PARTS_OF_PROCESS: usize = 6;
const PARTS_OF_USER: usize = 3;

/// The owner of an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Owner {
    /// The kernel side's number of the process, which stays when it executes another program.
    pub instance: u64,
    /// Its pid, for people.
    pub pid: u32,
    /// The user it is charged to.
    pub user: u32,
}

/// What is kept for a process or user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Bytes {
    /// Kept as long as its program runs.
    held: usize,
    /// Kept until the profile is written.
    left: usize,
}

impl Bytes {
    const fn sum(self) -> usize {
        self.held + self.left
    }
}

/// What is kept for all processes and users.
#[derive(Debug)]
pub struct Stock {
    of_process: usize,
    of_user: usize,
    processes: HashMap<u64, (Owner, Bytes)>,
    users: HashMap<u32, Bytes>,
    /// Who was refused something.
    refused: HashMap<Owner, bool>,
}

impl Default for Stock {
    fn default() -> Self {
        Self {
            of_process: OF_PROCESS,
            of_user: OF_USER,
            processes: HashMap::new(),
            users: HashMap::new(),
            refused: HashMap::new(),
        }
    }
}

/// Most refused owners that are named.
const MAX_REFUSED: usize = 64;

impl Stock {
    /// Applies `--max-memory`, so that no one's programs take what all others need.
    pub fn limit(&mut self, memory: u64) {
        let memory = usize::try_from(memory).unwrap_or(usize::MAX);
        self.of_process = self.of_process.min(memory / PARTS_OF_PROCESS);
        self.of_user = self.of_user.min(memory / PARTS_OF_USER);
    }

    /// Whether more may be kept of this process.
    pub fn has_room(&mut self, owner: Owner) -> bool {
        let process = self.processes.get(&owner.instance).map_or(0, |(_, bytes)| bytes.sum());
        let user = self.users.get(&owner.user).map_or(0, |bytes| bytes.sum());
        let (by_process, by_user) = (process > self.of_process, user > self.of_user);
        if (by_process || by_user) && self.refused.len() < MAX_REFUSED {
            self.refused.insert(owner, by_process);
        }
        !by_process && !by_user
    }

    /// `held` more bytes are kept while its program runs, and `left` more until the profile is written.
    pub fn add(&mut self, owner: Owner, held: usize, left: usize) {
        let process = &mut self.processes.entry(owner.instance).or_insert((owner, Bytes::default())).1;
        for bytes in [process, self.users.entry(owner.user).or_default()] {
            bytes.held += held;
            bytes.left += left;
        }
    }

    /// A program has ended: what was held for it is freed.
    pub fn free(&mut self, owner: Owner, held: usize) {
        if let Some((_, bytes)) = self.processes.get_mut(&owner.instance) {
            bytes.held = bytes.held.saturating_sub(held);
            if *bytes == Bytes::default() {
                self.processes.remove(&owner.instance);
            }
        }
        if let Some(bytes) = self.users.get_mut(&owner.user) {
            bytes.held = bytes.held.saturating_sub(held);
        }
    }

    /// The profile has been written, and a new one begins.
    pub fn begin_profile(&mut self) {
        for (_, bytes) in self.processes.values_mut() {
            bytes.left = 0;
        }
        self.processes.retain(|_, (_, bytes)| bytes.held > 0);
        for bytes in self.users.values_mut() {
            bytes.left = 0;
        }
    }

    /// What was refused since the last call, in words.
    pub fn refused(&mut self) -> Vec<String> {
        let told = self.refused.drain().map(|(Owner { pid, user, .. }, by_process)| {
            let (who, most) = if by_process {
                (format!("pid {pid} (user {user})"), self.of_process)
            } else {
                (format!("user {user}"), self.of_user)
            };
            format!("{who}: its functions take more than {} MiB: names of others are missing", most >> 20)
        });
        let mut told: Vec<String> = told.collect();
        told.sort();
        told.dedup();
        told
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(instance: u64, user: u32) -> Owner {
        Owner { instance, pid: 40 + u32::try_from(instance).unwrap(), user }
    }

    #[test]
    fn programs_of_a_process_share_its_limit() {
        let (mut stock, one) = (Stock::default(), owner(1, 7));
        for _ in 0..6 {
            assert!(stock.has_room(one));
            stock.add(one, 10 << 20, 11 << 20);
            stock.free(one, 10 << 20);
        }
        assert!(!stock.has_room(one), "what each left behind adds up");
        assert!(stock.has_room(owner(2, 7)));
        assert_eq!(
            stock.refused(),
            ["pid 41 (user 7): its functions take more than 64 MiB: names of others are missing"]
        );
        assert!(stock.refused().is_empty(), "it is told once");
        stock.begin_profile();
        assert!(stock.has_room(one));
    }

    #[test]
    fn processes_of_a_user_share_another() {
        let mut stock = Stock::default();
        stock.limit(96 << 20);
        for instance in 0..4 {
            stock.add(owner(instance, 7), 0, 10 << 20);
        }
        assert!(!stock.has_room(owner(9, 7)));
        assert!(stock.has_room(owner(9, 8)), "others have their own");
        assert_eq!(stock.refused(), ["user 7: its functions take more than 32 MiB: names of others are missing"]);
    }

    #[test]
    fn what_is_free_is_forgotten() {
        let mut stock = Stock::default();
        stock.add(owner(1, 7), 500, 0);
        stock.free(owner(1, 7), 500);
        assert!(stock.processes.is_empty());
        assert_eq!(stock.users[&7], Bytes::default());
    }
}
