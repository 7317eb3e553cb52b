//! `tachyon-fleet`.
//!
//! 0 done, 1 it could not be done, 2 usage.

use std::process::ExitCode;

fn main() -> ExitCode {
    tachyon_fleet::main()
}
