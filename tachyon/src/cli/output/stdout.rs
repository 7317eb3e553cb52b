//! Standard output as the destination of a whole file.

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::AsFd;

/// Whether nothing reads standard output any more: the pipe's reader or the terminal is gone.
#[must_use]
pub fn is_unread() -> bool {
    let stdout = io::stdout();
    let mut polled = [PollFd::new(stdout.as_fd(), PollFlags::empty())];
    // These two are reported without being requested; POLLERR means a pipe without readers.
    let gone = PollFlags::POLLERR | PollFlags::POLLHUP;
    poll(&mut polled, PollTimeout::ZERO).is_ok() && polled[0].revents().is_some_and(|told| told.intersects(gone))
}

/// Copies all of a file to it.
pub(super) fn copy(file: &mut File) -> io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut stdout = io::stdout().lock();
    io::copy(file, &mut stdout)?;
    stdout.flush()
}
