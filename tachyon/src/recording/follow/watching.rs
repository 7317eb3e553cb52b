//! When to listen to the host's mapping events.
//!
//! The kernel reports every process that maps a file: a build running beside a recording would wake the profiler a hundred times a
//! second. So where only some processes are recorded and all of them are known, the rings rest for a moment after events of
//! unrelated processes, and the longer no related event comes, the longer they rest. Nothing is lost: events that come meanwhile
//! are read after the rest. Where all processes are recorded and samples are rare the rings rest, too, unless a program that may be
//! CPython has just started.

use super::Follower;
use crate::discover::watch::{Drained, Watch};
use nix::sys::epoll::{Epoll, EpollEvent, EpollFlags};
use std::os::fd::AsFd as _;
use std::time::{Duration, Instant};

/// The first rest ...
const SHORTEST: Duration = Duration::from_millis(25);
/// ... and the longest: the most by which a newly loaded library is noticed late, unless a sample meets it ...
pub(super) const LONGEST: Duration = Duration::from_millis(500);
/// ... and the longest where it may be the library of an unknown CPython: two samples at 19 a second.
pub(super) const LONGEST_OF_ALL: Duration = Duration::from_millis(100);

/// After this long without any event, rests start over with the shortest.
const QUIET: Duration = Duration::from_secs(1);

/// The mapping events, and whether they wake.
pub(super) struct Watching {
    watch: Watch,
    /// How `epoll` identifies the descriptor.
    token: u64,
    listening: bool,
    /// Whether samples are so rare that events of all processes may gather.
    gather: bool,
    rest: Rest,
}

impl Watching {
    /// Has events wake whoever waits on `epoll`, with this `token`. With `gather`, events of all processes may gather.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn new(watch: Watch, epoll: &Epoll, token: u64, gather: bool) -> nix::Result<Self> {
        epoll.add(watch.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, token))?;
        Ok(Self { watch, token, listening: true, gather, rest: Rest::default() })
    }

    /// Passes all new events to the follower.
    pub fn drain(&mut self, follower: &mut Follower) -> Drained {
        let (before, mut ours) = (self.watch.taken(), false);
        let drained = self.watch.drain(&mut |event| ours |= follower.on_watch(&event));
        // Threads that are given names wake, too.
        let any = self.watch.taken() != before;
        if any || !self.listening {
            let now = Instant::now();
            let longest = follower.may_rest(self.gather, now).filter(|_| !ours && drained == Drained::All);
            self.rest.after(any, longest, now);
        }
        drained
    }

    /// How long until the rings are to be read even if they do not wake anyone; `None`: only when they do.
    pub fn wait(&mut self, epoll: &Epoll) -> Option<Duration> {
        let rests = self.rest.until.is_some();
        if rests == self.listening {
            let flags = if rests { EpollFlags::empty() } else { EpollFlags::EPOLLIN };
            let mut event = EpollEvent::new(flags, self.token);
            // If that fails, they wake the thread as before.
            if epoll.modify(self.watch.as_fd(), &mut event).is_ok() {
                self.listening = !rests;
            }
            if self.listening && !rests {
                // A ring's readiness can be asked for once (`perf_poll` takes it back), and listening again has just done so: events
                // since the rings were read would wake nobody.
                return Some(Duration::ZERO);
            }
        }
        Some(self.rest.until?.saturating_duration_since(Instant::now()))
    }
}

/// Until when the rings are not listened to.
#[derive(Debug, Default)]
struct Rest {
    length: Duration,
    until: Option<Instant>,
    /// When the last one was over, if there was no event.
    over: Option<Instant>,
}

impl Rest {
    /// The rings have been read, with `any` event in them. They may rest for `longest` at most.
    fn after(&mut self, any: bool, longest: Option<Duration>, now: Instant) {
        let Some(longest) = longest else {
            *self = Self::default();
            return;
        };
        if any {
            let long_ago = self.over.take().is_some_and(|over| now.saturating_duration_since(over) > QUIET);
            self.length = if long_ago { SHORTEST } else { (self.length * 2).clamp(SHORTEST, longest) };
            self.until = Some(now + self.length);
        } else if self.until.is_some_and(|until| until <= now) {
            (self.until, self.over) = (None, Some(now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::epoll::{EpollCreateFlags, EpollTimeout};
    use std::process::Command;

    /// 6 of 300 commands that ran beside a build had no sample: their libpython was mapped between the last read of the rings and
    /// the moment they were listened to again, so nobody looked at them any more.
    #[test]
    fn what_comes_before_it_listens_again_is_not_slept_through() {
        let watch = match Watch::open() {
            Ok(watch) => watch,
            Err(error) => return crate::not_run::not_run(&format!("root: {error}")),
        };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("a descriptor");
        let mut watching = Watching::new(watch, &epoll, 1, false).expect("it can be waited for");
        watching.rest.after(true, Some(LONGEST), Instant::now());
        assert!(watching.wait(&epoll).is_some() && !watching.listening, "others have mapped something");
        while watching.watch.drain(&mut |_| ()) == Drained::More {}
        watching.rest.after(false, None, Instant::now());
        assert!(Command::new("true").status().is_ok_and(|status| status.success()), "it maps its libraries");
        let pause = watching.wait(&epoll);
        let woken = epoll.wait(&mut [EpollEvent::empty()], EpollTimeout::ZERO);
        assert!(watching.listening && (pause == Some(Duration::ZERO) || woken == Ok(1)), "{pause:?}, {woken:?}");
    }

    #[test]
    fn what_others_do_lets_it_rest_the_longer() {
        let start = Instant::now();
        let mut rest = Rest::default();
        let ms = Duration::from_millis;
        // (time, any event, none of ours, rests until)
        for (line, (at, any, may_rest, until)) in [
            (0, true, true, Some(25)),
            // It is read before its time when something else wakes the thread.
            (10, false, true, Some(25)),
            (25, true, true, Some(75)),
            (75, true, true, Some(175)),
            (175, true, true, Some(375)),
            (375, true, true, Some(775)),
            (775, true, true, Some(1275)),
            (1275, false, true, None),
            (1300, true, true, Some(1800)),
            (1400, true, false, None),
            (2000, true, true, Some(2025)),
            (2025, false, true, None),
            (2100, true, true, Some(2150)),
            (2150, false, true, None),
            (3200, true, true, Some(3225)),
            (3225, true, true, Some(3275)),
            (3275, true, true, Some(3375)),
            (3375, true, true, Some(3575)),
        ]
        .into_iter()
        .enumerate()
        {
            rest.after(any, may_rest.then_some(LONGEST), start + ms(at));
            assert_eq!(rest.until, until.map(|until| start + ms(until)), "line {line}");
        }
        rest.after(true, Some(LONGEST_OF_ALL), start + ms(3600));
        assert_eq!(rest.until, Some(start + ms(3700)), "no longer than others allow");
    }
}
