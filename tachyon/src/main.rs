//! `tachyon-bpf`.
//!
//! Exits with 0: a profile was written (or the request was shown), 1: could not profile, 2: usage; with `-- CMD`: the command's status.

use std::process::ExitCode;

fn main() -> ExitCode {
    tachyon::main()
}
