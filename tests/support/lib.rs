//! What whole-program tests share: interpreters, the programs they run, the profiler, and the judges of its files.
//!
//! A test starts a program of `programs/` under an interpreter of the fixed list ([`Interpreter`], [`Target`]), records
//! it with the real `tachyon-bpf` ([`Profiler`]) and compares the file's stacks ([`Recorded`]) with what the program says
//! of itself ([`expect`]). Every recording, whatever the test looks at, passes the same checks: the account adds up
//! exactly, the kernel counted as many runs, and CPython 3.15's own reader sees the same samples.

pub mod expect;
mod extension;
mod gate;
mod interpreters;
pub mod judge;
mod lines;
pub mod matrix;
pub mod native_shares;
mod not_run;
mod profile;
mod profiler;
pub mod statistics;
mod stepper;
mod target;
pub mod unwind;
pub mod viewers;
mod wheels;

pub use extension::SharedLibrary;
pub use gate::{LiveGuard, live};
pub use interpreters::{INTERPRETERS, Interpreter};
pub use lines::{Frame, Line};
pub use not_run::not_run;
pub use profile::{Place, Recorded, Sample, ShownFrame, status};
pub use profiler::{
    Profiler, Recording, Running, binary, cpu_time, cpu_time_of, is_sampling, let_run, stretches, waited_for_cpu,
};
pub use stepper::Stepper;
pub use target::{Target, program};
pub use wheels::{package, with_wheels};

/// Turns a function that takes an interpreter into a test for each one of the fixed list, [`INTERPRETERS`]. `at_home:` takes
/// two that run outside a chroot, a shared and a static one, which stand for all in what does not depend on the version: the
/// profiler's command line and its account.
///
/// `of_each_kind:` is for what is the same in all that store their state alike: CI runs it on the oldest, a static and a
/// shared one from 3.11 on, the newest, and one without a GIL; `of_each_kind_with_gil:` leaves the free-threaded ones out. `on
/// [...]:` names those that CI runs, `long [...]` others. `and [...]` are some of those that only `cargo xtask zoo --all` sets
/// up, debug builds and long builds; the other forms take all of them. Those that CI has no time for are ignored, and run with
/// `cargo xtask test --every-interpreter`.
#[macro_export]
macro_rules! on_each_interpreter {
    (at_home: $($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_12 debian_3_11);
        }
    )+};
    (of_each_kind: $($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_8 pyenv_3_12 debian_3_11 sid_3_15 built_3_14t);
            $crate::on_each_interpreter!(@long $function: pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_13 sid_3_14 built_3_13t
                musl_3_13 wheel_3_15t);
            $crate::on_each_interpreter!(@extra $function: sid_3_14d sid_3_15d wheel_3_14t tail_3_14 standalone_3_14);
        }
    )+};
    (of_each_kind_with_gil: $($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_8 pyenv_3_12 debian_3_11 sid_3_15);
            $crate::on_each_interpreter!(@long $function: pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_13 sid_3_14 musl_3_13);
            $crate::on_each_interpreter!(@extra $function: sid_3_14d sid_3_15d tail_3_14 standalone_3_14);
        }
    )+};
    ($($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12
                pyenv_3_13 debian_3_11 sid_3_14 sid_3_15 built_3_13t musl_3_13 built_3_14t wheel_3_15t);
            $crate::on_each_interpreter!(@extra $function: sid_3_14d sid_3_15d wheel_3_14t tail_3_14 standalone_3_14);
        }
    )+};
    (on [$($name:ident)+] and [$($extra:ident)+]: $function:ident) => {
        mod $function {
            $crate::on_each_interpreter!(@one $function: $($name)+);
            $crate::on_each_interpreter!(@extra $function: $($extra)+);
        }
    };
    (on [$($name:ident)+] long [$($long:ident)+] and [$($extra:ident)+]: $function:ident) => {
        mod $function {
            $crate::on_each_interpreter!(@one $function: $($name)+);
            $crate::on_each_interpreter!(@long $function: $($long)+);
            $crate::on_each_interpreter!(@extra $function: $($extra)+);
        }
    };
    (on [$($name:ident)+] long [$($long:ident)+]: $function:ident) => {
        mod $function {
            $crate::on_each_interpreter!(@one $function: $($name)+);
            $crate::on_each_interpreter!(@long $function: $($long)+);
        }
    };
    (on [$($name:ident)+]: $function:ident) => {
        mod $function {
            $crate::on_each_interpreter!(@one $function: $($name)+);
        }
    };
    (@extra $function:ident: $($name:ident)+) => {
        $crate::on_each_interpreter!(@ignored "needs an interpreter of `cargo xtask zoo --all`", $function: $($name)+);
    };
    (@long $function:ident: $($name:ident)+) => {
        $crate::on_each_interpreter!(@ignored "the long form: `cargo xtask test --every-interpreter`", $function: $($name)+);
    };
    (@ignored $why:literal, $function:ident: $($name:ident)+) => {$(
        #[test]
        #[ignore = $why]
        fn $name() {
            let Some(_live) = $crate::live() else { return };
            super::$function(&$crate::Interpreter::named(stringify!($name)));
        }
    )+};
    (@one $function:ident: $($name:ident)+) => {$(
        #[test]
        fn $name() {
            let Some(_live) = $crate::live() else { return };
            super::$function(&$crate::Interpreter::named(stringify!($name)));
        }
    )+};
}
