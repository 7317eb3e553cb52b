//! The recorder: a [`Request`] opens an [`Opened`], which starts a [`Running`], which hands out [`Segment`]s.
//!
//! It uses all other modules except the command line. It prints nothing, handles no signals, and leaves its caller's
//! limits, signals and capabilities alone. What the user should know is in [`Status`], in the [`Segment`] and in
//! errors.
//!
//! A recording has these threads in addition to its caller's: `follow` maintains the process table; `events::Reader`
//! empties the ring; `samples` names samples, merges them and passes them to the sink; `native::Mapper` maintains unwind
//! tables, if native stacks are wanted; and `throttle` enforces the CPU limit, if there is one. A process may run several
//! recordings.
//!
//! This profiles a process for a second and prints its hottest lines (as root, or with the capabilities that
//! `tachyon-bpf doctor` names):
//!
//! ```
//! use std::process::{Command, Stdio};
//! use std::time::Duration;
//! use tachyon::recording::{Request, Targets};
//! use tachyon::types::Pid;
//!
//! # if !nix::unistd::geteuid().is_root() { println!("not run: it takes root"); return Ok(()); }
//! let program = "x = 0\nprint(flush=True)\nwhile True:\n    x = (x * 31 + 7) % 1000003";
//! let mut python = Command::new("python3").args(["-c", program]).stdout(Stdio::piped()).spawn()?;
//! // It runs Python as soon as it prints.
//! let mut line = [0];
//! std::io::Read::read_exact(python.stdout.as_mut().expect("piped"), &mut line)?;
//!
//! let request = Request::new(Targets::Pids(vec![Pid(python.id())]), Duration::from_millis(1));
//! let running = request.open()?.start()?;
//! std::thread::sleep(Duration::from_secs(1));
//! let segment = running.finish()?;
//!
//! println!("{} samples, {} lost", segment.report.stored, segment.report.loss.values().sum::<u64>());
//! for hot in segment.hottest_lines().iter().take(5) {
//!     println!("{:6} {}:{} {}", hot.samples, hot.file, hot.line.unwrap_or(0), hot.function);
//! }
//! # // A program that outlived a failure would hold the test's output open for ever.
//! # python.kill()?;
//! # python.wait()?;
//! # assert!(segment.report.stored > 50, "{:?}", segment.report);
//! # assert_eq!(segment.report.inconsistent, 0);
//! # let line = &segment.hottest_lines()[0];
//! # assert!(line.function == "<module>" && (3..=4).contains(&line.line.unwrap_or(0)), "{line:?}");
//! # Ok::<(), anyhow::Error>(())
//! ```

mod account;
mod bell;
mod expected;
mod follow;
mod give_back;
mod looker;
mod made;
mod memory;
mod names;
mod native;
mod open;
mod registry;
mod request;
mod running;
mod samples;
mod segment;
mod settled;
mod sleepers;
mod start;
mod stats;
mod targets;
mod task_waits;
mod throttle;
mod timer;
mod times;
mod totals;
mod waiting;
pub(crate) mod waits;

pub use crate::kernel::Waits;
pub use expected::on_path as program_named;
pub use native::NativePlan;
pub use open::Opened;
pub use request::{Request, Targets};
pub use running::{Over, Running, Status};
pub use segment::{BusyChildren, Hot, Segment, StackCount};
pub(crate) use start::Clock;
pub use totals::Totals;

pub use crate::kept::SymbolCache;
