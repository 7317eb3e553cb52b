//! A loader of BPF objects that knows none of the kernel's types.
//!
//! The library's loader reads and decodes all of them as soon as it is made, for relocations that this object does not
//! have: that takes a tenth of the start's time and a third of its memory. There is no other way to make one (aya 0.14,
//! `EbpfLoader::new`), but if their file cannot be opened it does without. So it is made on a thread that cannot open
//! files.

use aya::EbpfLoader;
use libc::{BPF_ABS, BPF_JEQ, BPF_JMP, BPF_K, BPF_LD, BPF_RET, BPF_W, c_long, c_ulong, sock_filter, sock_fprog};
use std::io;
use std::mem::offset_of;
use std::thread::{Builder, ScopedJoinHandle, scope};

/// The system calls that open files.
#[cfg(target_arch = "x86_64")]
const OPENING: &[c_long] = &[libc::SYS_open, libc::SYS_openat, libc::SYS_openat2];
#[cfg(not(target_arch = "x86_64"))]
const OPENING: &[c_long] = &[libc::SYS_openat, libc::SYS_openat2];

/// Makes a loader.
pub(super) fn loader<'a>() -> EbpfLoader<'a> {
    let made = scope(|scope| {
        let thread = Builder::new().name("tachyon-loader".to_owned()).spawn_scoped(scope, without_types).ok();
        thread.map(ScopedJoinHandle::join)
    });
    let mut loader = made.and_then(Result::ok).unwrap_or_default();
    // In case they were read all the same.
    loader.btf(None);
    loader
}

fn without_types<'a>() -> EbpfLoader<'a> {
    // If the kernel refuses, making the loader takes longer.
    let _refused = forbid_opening();
    EbpfLoader::new()
}

/// From now on the calling thread, and no other, cannot open files: each attempt finds none.
fn forbid_opening() -> io::Result<()> {
    // Classic BPF: constants of `linux/filter.h`, all of which fit.
    let op = |code: u32| code as u16;
    let not_found = libc::SECCOMP_RET_ERRNO | libc::ENOENT as u32;
    let number = offset_of!(libc::seccomp_data, nr) as u32;
    let mut filter = vec![sock_filter { code: op(BPF_LD | BPF_W | BPF_ABS), jt: 0, jf: 0, k: number }];
    for &call in OPENING {
        filter.push(sock_filter { code: op(BPF_JMP | BPF_JEQ | BPF_K), jt: 0, jf: 1, k: call as u32 });
        filter.push(sock_filter { code: op(BPF_RET | BPF_K), jt: 0, jf: 0, k: not_found });
    }
    filter.push(sock_filter { code: op(BPF_RET | BPF_K), jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW });
    let program = sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let yes: c_ulong = 1;
    let no: c_ulong = 0;
    // SAFETY: takes numbers only. Both hold for the calling thread alone (prctl(2), seccomp(2)).
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, yes, no, no, no) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel copies the program, which outlives the call.
    if unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_opens_nothing_and_others_do() {
        let there = || std::fs::read("/proc/self/stat").map(drop).map_err(|error| error.kind());
        let thread = std::thread::spawn(move || {
            forbid_opening().expect("any thread may restrict itself");
            there()
        });
        assert_eq!(thread.join().expect("the thread ends well"), Err(io::ErrorKind::NotFound));
        assert_eq!(there(), Ok(()));
    }

    #[test]
    fn no_types_are_read() {
        let shown = std::thread::spawn(|| format!("{:?}", without_types())).join().expect("the thread ends well");
        assert!(shown.contains("btf: None"), "{shown}");
        assert!(!format!("{:?}", EbpfLoader::new()).contains("btf: None"), "elsewhere they are");
    }
}
