//! `tachyon-bpf`.
//!
//! 0 a profile was written (or what was asked for was shown), 1 could not profile, 2 usage; with `-- CMD` the command's own status.

use std::process::ExitCode;

fn main() -> ExitCode {
    tachyon::main()
}
