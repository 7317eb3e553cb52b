//! The thread that follows processes: sleeps until something is told, and lets the [`Follower`] deal with it.

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

/// How long one kind of work goes on before the next has its turn.
const SLICE: Duration = Duration::from_millis(50);
/// What is left at the end has this long.
const LAST: Duration = Duration::from_millis(400);

impl Follow {
    /// Starts following. `watch` is for recordings that new processes may join: it is told of every program start on the
    /// host. Without it, a target that execs is looked at again and again until it is known.
    ///
    /// # Errors
    /// When the thread or its descriptors cannot be made.
    pub fn start(
        mut follower: Follower,
        mut events: RingBuf<MapData>,
        watch: Option<Watch>,
        bells: Bells,
        end: End,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(events.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, EVENTS))?;
        let mut watching = watch.map(|watch| Watching::new(watch, &epoll, WATCH)).transpose()?;
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
                let mut stopped = has_stopped(&epoll, timeout);
                // However much there is to be dealt with, it is seen when the recording ends.
                while !stopped {
                    // Process events first: a mapping means something only of a process that is known.
                    more = drain(&mut follower, &mut events, Instant::now() + SLICE);
                    if let Some(watching) = &mut watching {
                        more |= watching.drain(&mut follower) == Drained::More;
                    }
                    more |= follower.look_at_due(Instant::now() + SLICE);
                    more |= follower.look_for_work();
                    if !more {
                        break;
                    }
                    stopped = has_stopped(&epoll, Duration::ZERO);
                }
                if stopped {
                    let until = Instant::now() + LAST;
                    more |= drain(&mut follower, &mut events, until);
                    // The ends of those that could not be looked at any more come last.
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
                if bells.follow.heard() || last_turn.elapsed() >= TURN {
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

    /// Deals with what has been told so far, and ends.
    ///
    /// # Errors
    /// When the thread has panicked: what that means for the recording.
    pub fn stop(self) -> Result<(), &'static str> {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.stop.write(1);
        self.thread.join().map_err(|_| "the thread that follows processes ended early: later processes are missing")
    }
}

/// Waits until something is told; true when the recording has ended.
fn has_stopped(epoll: &Epoll, timeout: Duration) -> bool {
    // In whole milliseconds, and one more: never before its time.
    let timeout = if timeout.is_zero() { timeout } else { timeout + Duration::from_millis(1) };
    let mut ready = [EpollEvent::empty(); 4];
    let count = epoll.wait(&mut ready, EpollTimeout::try_from(timeout).unwrap_or(EpollTimeout::ZERO)).unwrap_or(0);
    ready.iter().take(count).any(|event| event.data() == STOP)
}

/// Deals with process events until then; true when there may be more.
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
