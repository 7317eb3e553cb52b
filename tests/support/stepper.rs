//! A thread that is run instruction by instruction (ptrace(2)): each step is a context switch, and so one sample of `-e
//! context-switches`.

use std::io::Error;
use std::ptr;

/// A thread that is stopped between steps. It runs on by itself when this is dropped.
#[derive(Debug)]
pub struct Stepper {
    tid: i32,
}

impl Stepper {
    /// Stops a thread. The calling thread is the one that steps.
    ///
    /// # Panics
    /// When there is no such thread, or it may not be traced.
    #[must_use]
    pub fn stop(tid: u32) -> Self {
        let stepper = Self { tid: i32::try_from(tid).expect("thread ids are positive") };
        stepper.request(libc::PTRACE_SEIZE, 0);
        stepper.request(libc::PTRACE_INTERRUPT, 0);
        stepper.wait();
        stepper
    }

    /// Lets it execute this many instructions.
    ///
    /// # Panics
    /// When it ends meanwhile.
    pub fn steps(&mut self, count: usize) {
        let mut signal = 0;
        for _ in 0..count {
            self.request(libc::PTRACE_SINGLESTEP, signal);
            let status = self.wait();
            let stopped = libc::WSTOPSIG(status);
            // A signal of its own is delivered with the next step.
            signal = if stopped == libc::SIGTRAP || status >> 16 != 0 { 0 } else { stopped };
        }
    }

    fn request(&self, request: libc::c_uint, data: i32) {
        let data = ptr::without_provenance_mut::<libc::c_void>(usize::try_from(data).unwrap_or(0));
        // SAFETY: none of these requests writes memory of this process.
        let result = unsafe { libc::ptrace(request, self.tid, ptr::null_mut::<libc::c_void>(), data) };
        assert_eq!(result, 0, "ptrace request {request:#x} of {}: {}", self.tid, Error::last_os_error());
    }

    fn wait(&self) -> i32 {
        let mut status = 0;
        // SAFETY: the status is a local variable.
        let result = unsafe { libc::waitpid(self.tid, &raw mut status, libc::__WALL) };
        assert_eq!(result, self.tid, "thread {}: {}", self.tid, Error::last_os_error());
        assert!(libc::WIFSTOPPED(status), "thread {} has ended: status {status:#x}", self.tid);
        status
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        let none = ptr::null_mut::<libc::c_void>();
        // SAFETY: the request uses no memory of this process. It fails if the thread has ended.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.tid, none, none) };
    }
}
