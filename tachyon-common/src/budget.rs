//! How many bytes of names processes and users may have sent in a second.
//!
//! A program can make functions with long names as fast as it likes; each is sent at first sight, through the ring that all
//! samples go through. What is too much is put off: the code object is sent with a later sample. The shares lie in a table
//! without a lock that all CPUs write: what they lose of each other's sums is some records' worth.

use crate::walk::mix;

/// Bytes of code records of one process in a second. Django's start, with some 3,000 functions in its first seconds, takes 2 MiB
/// altogether; a process that lives 50 ms sends 100 KiB.
pub const OF_PROCESS: u32 = 1 << 20;
/// Of all processes of one user: as much as four such processes' starts. The reader empties a ring of 1 MiB five times a second.
pub const OF_USER: u32 = 4 << 20;

/// Slots of processes in the map `SHARES` (a power of two): 2^12 * 16 bytes = 64 KiB.
pub const PROCESS_SLOTS: u32 = 4096;
/// Slots of users (a power of two), behind those.
pub const USER_SLOTS: u32 = 512;

/// What somebody had sent in one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Share {
    /// Whose it is: tgid, or user id.
    pub owner: u32,
    /// The second: `bpf_ktime_get_ns()` divided by 2^30.
    pub second: u32,
    /// Bytes sent in it.
    pub bytes: u32,
    /// Explicit padding.
    pub _pad: u32,
}

impl Share {
    /// What is left of a second that somebody shares with whoever came to this slot before in the same second.
    #[inline(always)]
    #[must_use]
    pub const fn of(self, owner: u32, second: u32) -> Self {
        if self.second == second { self } else { Self { owner, second, bytes: 0, _pad: 0 } }
    }

    /// Whether there is anything left of this much.
    #[inline(always)]
    #[must_use]
    pub const fn has_room(&self, most: u32) -> bool {
        self.bytes < most
    }

    /// The same after so many bytes more.
    #[inline(always)]
    #[must_use]
    pub const fn with(self, bytes: u32) -> Self {
        Self { bytes: self.bytes.wrapping_add(bytes), ..self }
    }
}

/// The second that a moment lies in.
#[inline(always)]
#[must_use]
pub const fn second_of(ktime_ns: u64) -> u32 {
    (ktime_ns >> 30) as u32
}

/// Where a process's share lies. (The seed is secret: no process can choose whose slot it comes to.)
#[inline(always)]
#[must_use]
pub const fn process_slot(seed: u64, tgid: u32) -> u32 {
    (mix(seed, tgid as u64) >> 32) as u32 & (PROCESS_SLOTS - 1)
}

/// The same of a user.
#[inline(always)]
#[must_use]
pub const fn user_slot(seed: u64, uid: u32) -> u32 {
    PROCESS_SLOTS + ((mix(seed, uid as u64 | 1 << 32) >> 32) as u32 & (USER_SLOTS - 1))
}

const _: () = assert!(size_of::<Share>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_has_its_share() {
        let mut slot = Share::default();
        let (mut sent, mut put_off) = (0_u32, 0_u32);
        for step in 0..4_000_u64 {
            // A record of 8 KiB each millisecond.
            let share = slot.of(7, second_of(step * 1_000_000 + (1 << 30)));
            if share.has_room(OF_PROCESS) {
                slot = share.with(8192);
                sent += 1;
            } else {
                put_off += 1;
            }
        }
        // Four seconds of 128 records, of which the last is not whole.
        assert_eq!((sent, put_off), (4 * 128, 4_000 - 4 * 128));
    }

    #[test]
    fn who_meets_another_in_a_slot_shares_it() {
        let taken = Share::default().of(7, 3).with(OF_PROCESS);
        assert!(!taken.of(8, 3).has_room(OF_PROCESS));
        assert!(taken.of(8, 4).has_room(OF_PROCESS), "until the second is over");
        assert_eq!(taken.of(8, 4).owner, 8);
    }

    #[test]
    fn slots_are_in_bounds_and_apart() {
        for number in 0..10_000 {
            assert!(process_slot(9, number) < PROCESS_SLOTS);
            assert!((PROCESS_SLOTS..PROCESS_SLOTS + USER_SLOTS).contains(&user_slot(9, number)));
        }
        assert_ne!(process_slot(1, 5), process_slot(2, 5));
    }
}
