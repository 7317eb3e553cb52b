//! The thread that follows processes: sleeps until an event comes, and lets the [`Follower`] deal with it.

use super::watching::Watching;
use super::{Follower, IDLE_TURN, QUICK_TURN, TURN};
use crate::discover::watch::{Drained, Watch};
use crate::events::{Event, Events};
use crate::kernel::{drop_privileges, make_urgent};
use crate::recording::bell::Bells;
use crate::remote::{End, Patience};
use aya::maps::{MapData, RingBuf};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The following thread.
pub(in super::super) struct Follow {
    stop: Arc<EventFd>,
    thread: JoinHandle<()>,
}

const EVENTS: u64 = 0;
const WATCH: u64 = 1;
const STOP: u64 = 2;
const BELL: u64 = 3;

/// A program that may be CPython maps its libraries within this time; until then events are handled at once.
pub(super) const LIBRARIES_WITHIN: Duration = Duration::from_millis(20);
/// Otherwise events gather for this fraction of the time between two samples of a CPU: a program that is looked at that much
/// later has lost a fiftieth of a sample.
const PART_OF_INTERVAL: f64 = 0.02;
/// But for no longer than this: by then most programs that start have mapped all their files, or ended ...
const LONGEST_PAUSE: Duration = Duration::from_millis(1);
/// ... and where the pause would be shorter than this, there is none.
const SHORTEST_PAUSE: Duration = Duration::from_micros(200);

/// How long events gather. Most programs that start are not CPython, and each causes events for its start, for every file that it
/// maps and for its end: waking for each took more than a third of the cost of following a host with 1,000 starts a minute.
fn pause_at(samples_a_second: f64) -> Duration {
    let pause = Duration::try_from_secs_f64(PART_OF_INTERVAL / samples_a_second).unwrap_or(LONGEST_PAUSE);
    if pause < SHORTEST_PAUSE { Duration::ZERO } else { pause.min(LONGEST_PAUSE) }
}

/// How long one kind of work goes on before the next has its turn.
const SLICE: Duration = Duration::from_millis(50);
/// Time for what is left to do at the end.
const LAST: Duration = Duration::from_millis(400);

impl Follow {
    /// Starts following. `watch` is for recordings that new processes may join: it reports every program start on the host.
    /// Without it, a target that execs is looked at again and again until it is known. `samples_a_second` is per CPU.
    ///
    /// # Errors
    /// When the thread or its descriptors cannot be made.
    pub fn start(
        mut follower: Follower,
        mut events: RingBuf<MapData>,
        watch: Option<Watch>,
        samples_a_second: f64,
        bells: Bells,
        end: End,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(events.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, EVENTS))?;
        let pause = pause_at(samples_a_second);
        let mut watching = watch.map(|watch| Watching::new(watch, &epoll, WATCH, !pause.is_zero())).transpose()?;
        epoll.add(stop.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        epoll.add(bells.follow.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, BELL))?;
        let thread = std::thread::Builder::new().name("tachyon-follow".to_owned()).spawn(move || {
            make_urgent();
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges();
            let _concerned = end.concerns_this_thread(Patience::Short);
            let mut last_turn = Instant::now();
            loop {
                let quick = watching.is_none() && !follower.undecided.is_empty();
                let timeout = match follower.undecided.is_empty() {
                    _ if quick => QUICK_TURN,
                    true => IDLE_TURN,
                    false => TURN,
                };
                let rests = watching.as_mut().and_then(|watching| watching.wait(&epoll));
                let timeout = follower.until_next_look().into_iter().chain(rests).fold(timeout, Duration::min);
                let mut more = false;
                let Woken { mut stopped, told, rung } = wait(&epoll, timeout);
                if told && !stopped && !pause.is_zero() {
                    // Unknown programs that start are looked at while they still exist.
                    more = drain(&mut follower, &mut events, Instant::now() + SLICE);
                    if !more && follower.is_calm(Instant::now()) {
                        std::thread::sleep(pause);
                    }
                }
                // However much there is to do, the end of the recording is noticed.
                while !stopped {
                    // Process events first: a mapping event only makes sense for a known process.
                    more = drain(&mut follower, &mut events, Instant::now() + SLICE);
                    if let Some(watching) = &mut watching {
                        more |= watching.drain(&mut follower) == Drained::More;
                    }
                    more |= follower.look_at_due(Instant::now() + SLICE);
                    more |= follower.look_for_work();
                    if !more {
                        break;
                    }
                    stopped = wait(&epoll, Duration::ZERO).stopped;
                }
                if stopped {
                    let until = Instant::now() + LAST;
                    more |= drain(&mut follower, &mut events, until);
                    // Records of the ends of processes that could no longer be looked at come last.
                    more |= !follower.decide_all(until);
                    more |= drain(&mut follower, &mut events, until + SLICE);
                    if more && Instant::now() >= until {
                        follower.note("too much happened on the host at the end: processes may be missing".to_owned());
                    }
                    return;
                }
                if quick {
                    follower.ask_for_undecided();
                }
                if (rung && bells.follow.heard()) || last_turn.elapsed() >= TURN {
                    last_turn = Instant::now();
                    follower.turn();
                }
                if follower.has_news() {
                    bells.news.ring();
                }
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Deals with the events so far, and ends.
    ///
    /// # Errors
    /// When the thread has panicked: what that means for the recording.
    pub fn stop(self) -> Result<(), &'static str> {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.stop.write(1);
        self.thread.join().map_err(|_| "the thread that follows processes ended early: later processes are missing")
    }
}

/// Why the thread woke up.
struct Woken {
    /// The recording has ended.
    stopped: bool,
    /// There are process events.
    told: bool,
    /// Another thread has work for it.
    rung: bool,
}

/// Waits until there is something to do.
fn wait(epoll: &Epoll, timeout: Duration) -> Woken {
    // In whole milliseconds, rounded up: never early.
    let timeout = if timeout.is_zero() { timeout } else { timeout + Duration::from_millis(1) };
    let mut ready = [EpollEvent::empty(); 4];
    let count = epoll.wait(&mut ready, EpollTimeout::try_from(timeout).unwrap_or(EpollTimeout::ZERO)).unwrap_or(0);
    let is_ready = |token| ready.iter().take(count).any(|event| event.data() == token);
    Woken { stopped: is_ready(STOP), told: is_ready(EVENTS) || is_ready(WATCH), rung: is_ready(BELL) }
}

/// Deals with process events until `until`; true when there may be more.
fn drain(follower: &mut Follower, events: &mut RingBuf<MapData>, until: Instant) -> bool {
    while let Some(item) = events.next() {
        for event in Events::new(&item) {
            if let Ok(Event::Process(record)) = event {
                follower.on_process(&record);
            }
        }
        if Instant::now() >= until {
            return true;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_gather_where_samples_are_rare() {
        let us = |rate| pause_at(rate).as_micros();
        assert_eq!((us(1.0), us(19.0), us(50.0), us(99.0), us(101.0), us(9_999.0)), (1000, 1000, 400, 202, 0, 0));
        assert_eq!(pause_at(0.0), LONGEST_PAUSE, "a rate of none is no reason to panic");
    }
}
