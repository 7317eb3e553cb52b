//! The thread that follows processes: sleeps until something is told, and lets the [`Follower`] deal with it.

use super::{Follower, QUICK_TURN, TURN};
use crate::discover::watch::{Drained, Watch};
use crate::events::{Event, Events};
use crate::kernel::{drop_privileges, make_urgent};
use aya::maps::{MapData, RingBuf};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread::JoinHandle;

/// The following thread.
pub(in super::super) struct Follow {
    stop: Arc<EventFd>,
    thread: JoinHandle<()>,
}

const EVENTS: u64 = 0;
const WATCH: u64 = 1;
const STOP: u64 = 2;

impl Follow {
    /// Starts following. `watch` is for recordings that new processes may join: it is told of every program start on the
    /// host. Without it, a target that execs is looked at again and again until it is known.
    ///
    /// # Errors
    /// When the thread or its descriptors cannot be made.
    pub fn start(
        mut follower: Follower,
        mut events: RingBuf<MapData>,
        mut watch: Option<Watch>,
    ) -> std::io::Result<Self> {
        let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(events.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, EVENTS))?;
        if let Some(watch) = &watch {
            epoll.add(watch.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, WATCH))?;
        }
        epoll.add(stop.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
        let thread = std::thread::Builder::new().name("tachyon-follow".to_owned()).spawn(move || {
            make_urgent();
            // Where the kernel refuses, the main thread says so.
            let _refused = drop_privileges();
            loop {
                let quick = watch.is_none() && !follower.undecided.is_empty();
                let timeout =
                    EpollTimeout::try_from(if quick { QUICK_TURN } else { TURN }).unwrap_or(EpollTimeout::NONE);
                let mut ready = [EpollEvent::empty(); 3];
                let count = epoll.wait(&mut ready, timeout).unwrap_or(0);
                // Process events first: a mapping means something only of a process that is known.
                drain(&mut follower, &mut events);
                while let Some(watch) = &mut watch
                    && watch.drain(&mut |event| follower.on_watch(&event)) == Drained::More
                {
                    drain(&mut follower, &mut events);
                }
                if quick {
                    follower.look_at_undecided();
                }
                follower.turn();
                if ready.iter().take(count).any(|event| event.data() == STOP) {
                    drain(&mut follower, &mut events);
                    follower.settle();
                    // The ends of those that could not be looked at any more.
                    drain(&mut follower, &mut events);
                    return;
                }
            }
        })?;
        Ok(Self { stop, thread })
    }

    /// Deals with what has been told so far, and ends.
    pub fn stop(self) {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.stop.write(1);
        if self.thread.join().is_err() {
            eprintln!("tachyon-bpf: the thread that follows processes ended early: later processes are missing");
        }
    }
}

fn drain(follower: &mut Follower, events: &mut RingBuf<MapData>) {
    while let Some(item) = events.next() {
        for event in Events::new(&item) {
            if let Ok(Event::Process(record)) = event {
                follower.on_process(&record);
            }
        }
    }
}
