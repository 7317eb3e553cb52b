//! Wakes a thread that sleeps until there is something for it to do.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Its descriptor is readable from when it is rung until it is heard. Clones share one bell.
#[derive(Clone, Debug)]
pub(super) struct Bell(Arc<EventFd>);

impl Bell {
    /// Nobody has rung it yet.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?)))
    }

    /// Wakes whoever waits for it.
    pub fn ring(&self) {
        // An event descriptor's write fails only when its count would overflow.
        let _full = self.0.write(1);
    }

    /// Whether it has been rung since it was last heard.
    pub fn heard(&self) -> bool {
        self.0.read().is_ok()
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Who is woken by whom.
#[derive(Clone, Debug)]
pub(super) struct Bells {
    /// [`Running::status`](super::Running::status) has something new to tell.
    pub news: Bell,
    /// The thread that follows processes has work that does not come from a process event.
    pub follow: Bell,
}

impl Bells {
    /// Nobody has rung them yet.
    ///
    /// # Errors
    /// When there are no descriptors left.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self { news: Bell::new()?, follow: Bell::new()? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rung_twice_it_is_heard_once() {
        let bell = Bell::new().expect("a descriptor");
        assert!(!bell.heard());
        bell.ring();
        bell.clone().ring();
        assert!(bell.heard() && !bell.heard());
    }
}
