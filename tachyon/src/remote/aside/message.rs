//! What recorder and helpers say to each other: one request is one packet, an answer one or more.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};

use nix::errno::Errno;

/// Most bytes of an answer's packet, apart from its head.
pub(super) const CHUNK: usize = 64 << 10;
/// Bytes of a request, without what follows it.
pub(super) const REQUEST: usize = 32;
/// Most bytes of its paths: a root directory's, and one below it.
pub(super) const MAX_PATHS: usize = 8 << 10;
/// Bytes of a page of a request for pages. Smaller than the system's page is fine; a larger one would be unreadable at
/// the ends of mappings.
pub const PAGE: usize = 4096;
/// Most pages that are asked for at once.
pub(super) const MAX_PAGES: usize = MAX_PATHS / size_of::<u64>();
/// Bytes of a packet's head.
pub(super) const REPLY: usize = 12;

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Kind {
    /// `len` bytes at `addr` of the memory of `pid`.
    Memory,
    /// The file at a path, at most `len` bytes.
    Whole,
    /// What is at a path; or, if a second one follows, at the second one below the first.
    Find,
    /// `len` bytes at `addr` of the file that comes with the request.
    File,
    /// Pages of the memory of `pid`, whose numbers follow the request: one after the other, up to the first that cannot be read.
    Pages,
}

/// A request; paths follow it, each with a NUL, or numbers of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) kind: Kind,
    pub(super) pid: i32,
    pub(super) addr: u64,
    pub(super) len: u64,
}

impl Request {
    pub(super) fn bytes(&self) -> [u8; REQUEST] {
        let mut bytes = [0; REQUEST];
        bytes[..4].copy_from_slice(&(self.kind as u32).to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.pid.to_ne_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_ne_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_ne_bytes());
        bytes
    }

    /// The request at the start of a packet, and what follows.
    pub(super) fn parse(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_first_chunk::<REQUEST>()?;
        let kind = match u32::from_ne_bytes(*head.first_chunk()?) {
            0 => Kind::Memory,
            1 => Kind::Whole,
            2 => Kind::Find,
            3 => Kind::File,
            4 => Kind::Pages,
            _ => return None,
        };
        let pid = i32::from_ne_bytes(*head.get(4..)?.first_chunk()?);
        let addr = u64::from_ne_bytes(*head.get(8..)?.first_chunk()?);
        let len = u64::from_ne_bytes(*head.get(16..)?.first_chunk()?);
        Some((Self { kind, pid, addr, len }, rest))
    }
}

/// The head of an answer's packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Reply {
    /// 0, or why there is nothing.
    pub(super) errno: i32,
    /// No packet follows.
    pub(super) last: u32,
    /// How long the answer so far had to wait for what it needed.
    pub(super) waited_us: u32,
}

impl Reply {
    pub(super) fn bytes(&self) -> [u8; REPLY] {
        let mut bytes = [0; REPLY];
        bytes[..4].copy_from_slice(&self.errno.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.last.to_ne_bytes());
        bytes[8..].copy_from_slice(&self.waited_us.to_ne_bytes());
        bytes
    }

    pub(super) fn parse(bytes: &[u8; REPLY]) -> Self {
        let word = |at: usize| [bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]];
        Self {
            errno: i32::from_ne_bytes(word(0)),
            last: u32::from_ne_bytes(word(4)),
            waited_us: u32::from_ne_bytes(word(8)),
        }
    }
}

/// What was found at a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::remote) struct Found {
    pub(in crate::remote) dev: u64,
    pub(in crate::remote) inode: u64,
    pub(in crate::remote) mtime_s: i64,
    pub(in crate::remote) mtime_ns: i64,
    pub(in crate::remote) size: u64,
    /// 1 for a regular file.
    pub(in crate::remote) regular: u64,
    /// Which file system it is in (statfs(2)).
    pub(in crate::remote) system: i64,
    /// Its owner.
    pub(in crate::remote) owner: u64,
}

/// Bytes of a [`Found`].
pub(super) const FOUND: usize = 64;

impl Found {
    pub(super) fn bytes(&self) -> [u8; FOUND] {
        let Self { dev, inode, mtime_s, mtime_ns, size, regular, system, owner } = *self;
        let words = [dev, inode, mtime_s as u64, mtime_ns as u64, size, regular, system as u64, owner];
        let mut bytes = [0; FOUND];
        for (into, word) in bytes.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        bytes
    }

    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let word = |at: usize| Some(u64::from_ne_bytes(*bytes.get(at * 8..)?.first_chunk()?));
        Some(Self {
            dev: word(0)?,
            inode: word(1)?,
            mtime_s: word(2)? as i64,
            mtime_ns: word(3)? as i64,
            size: word(4)?,
            regular: word(5)?,
            system: word(6)? as i64,
            owner: word(7)?,
        })
    }
}

/// Room for one descriptor's control message.
#[repr(C, align(8))]
struct Control([u8; 32]);

/// Sends one packet, perhaps with a descriptor. (The function in `nix` allocates, which a helper must not.)
pub(super) fn send(socket: BorrowedFd<'_>, parts: &[IoSlice<'_>], file: Option<BorrowedFd<'_>>) -> Result<(), Errno> {
    let mut control = Control([0; 32]);
    // SAFETY: all zeros are a message without anything.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    // `IoSlice` is an `iovec` on Unix.
    message.msg_iov = parts.as_ptr().cast_mut().cast();
    message.msg_iovlen = parts.len() as _;
    if let Some(file) = file {
        message.msg_control = control.0.as_mut_ptr().cast();
        // SAFETY: these only compute with numbers.
        message.msg_controllen = unsafe { libc::CMSG_SPACE(size_of::<RawFd>() as u32) } as _;
        // SAFETY: the message has room for one header.
        let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        // SAFETY: as above.
        let len = unsafe { libc::CMSG_LEN(size_of::<RawFd>() as u32) } as _;
        // SAFETY: null, or a header of zeros in `control`.
        let Some(head) = (unsafe { header.as_mut() }) else { return Err(Errno::EINVAL) };
        (head.cmsg_len, head.cmsg_level, head.cmsg_type) = (len, libc::SOL_SOCKET, libc::SCM_RIGHTS);
        // SAFETY: the header was just written.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: after the header there is room for a descriptor.
        unsafe { data.cast::<RawFd>().write_unaligned(file.as_raw_fd()) };
    }
    // SAFETY: the message's parts outlive the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    Errno::result(sent).map(drop)
}

/// Receives one packet; 0 bytes are the end.
pub(super) fn receive(socket: BorrowedFd<'_>, into: &mut [u8]) -> Result<(usize, Option<OwnedFd>), Errno> {
    receive_parts(socket, &mut [IoSliceMut::new(into)], 0)
}

/// The same into several parts.
pub(super) fn receive_parts(
    socket: BorrowedFd<'_>,
    parts: &mut [IoSliceMut<'_>],
    flags: libc::c_int,
) -> Result<(usize, Option<OwnedFd>), Errno> {
    let mut control = Control([0; 32]);
    // SAFETY: all zeros are a message without anything.
    let mut message: libc::msghdr = unsafe { MaybeUninit::zeroed().assume_init() };
    message.msg_iov = parts.as_mut_ptr().cast();
    message.msg_iovlen = parts.len() as _;
    message.msg_control = control.0.as_mut_ptr().cast();
    message.msg_controllen = control.0.len() as _;
    // SAFETY: the message's parts outlive the call.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC) };
    let got = Errno::result(got)?;
    // SAFETY: the kernel has filled the message in.
    let header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: null, or a header in `control`.
    let rights = unsafe { header.as_ref() }
        .is_some_and(|header| (header.cmsg_level, header.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS));
    let file = rights.then(|| {
        // SAFETY: the header is there.
        let data = unsafe { libc::CMSG_DATA(header) };
        // SAFETY: the kernel has put at least one descriptor there.
        let file = unsafe { data.cast::<RawFd>().read_unaligned() };
        // SAFETY: it belongs to this process since it was received, and nothing else owns it.
        unsafe { OwnedFd::from_raw_fd(file) }
    });
    Ok((got.unsigned_abs(), file))
}
