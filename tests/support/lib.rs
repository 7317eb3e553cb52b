//! What whole-program tests share: interpreters, the programs they run, the profiler, and the judges of its files.
//!
//! A test starts a program of `programs/` under an interpreter of the fixed list ([`Interpreter`], [`Target`]), records
//! it with the real `tachyon-bpf` ([`Profiler`]) and compares the file's stacks ([`Recorded`]) with what the program says
//! of itself ([`expect`]). Every recording, whatever the test looks at, passes through the same checks: the account adds
//! up to the unit, the kernel counted as many runs, and CPython 3.15's own reader sees the same samples.

pub mod expect;
mod gate;
mod interpreters;
pub mod judge;
pub mod matrix;
mod profile;
mod profiler;
pub mod statistics;
mod target;
pub mod viewers;

pub use gate::{LiveGuard, live};
pub use interpreters::{INTERPRETERS, Interpreter};
pub use profile::{Place, Recorded, Sample, ShownFrame, status};
pub use profiler::{Profiler, Recording, Running, binary};
pub use target::{Target, program};

/// Makes a test of a function for each interpreter of the fixed list, [`INTERPRETERS`]. The function takes the
/// interpreter. `with_gil:` leaves the free-threaded ones out; `at_home:` takes the four that run outside of a chroot
/// and stand for all in what does not depend on the version: the profiler's command line and its account; `on [...]:` names them. Those that
/// only `cargo xtask zoo --all` sets up are ignored unless asked for (`-- --ignored`): debug builds, for which CI has
/// no time, and a build whose source not every mirror has.
#[macro_export]
macro_rules! on_each_interpreter {
    (at_home: $($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_11 pyenv_3_12 pyenv_3_13 debian_3_11);
        }
    )+};
    (with_gil: $($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12
                pyenv_3_13 debian_3_11 sid_3_14 sid_3_15 musl_3_13);
            $crate::on_each_interpreter!(@extra $function: sid_3_14d sid_3_15d);
        }
    )+};
    ($($function:ident),+ $(,)?) => {$(
        mod $function {
            $crate::on_each_interpreter!(@one $function: pyenv_3_8 pyenv_3_9 pyenv_3_10 pyenv_3_11 pyenv_3_12
                pyenv_3_13 debian_3_11 sid_3_14 sid_3_15 built_3_13t musl_3_13);
            $crate::on_each_interpreter!(@extra $function: sid_3_14d sid_3_15d built_3_14t);
        }
    )+};
    (on [$($name:ident)+] $(extra [$($more:ident)+])?: $function:ident) => {
        mod $function {
            $crate::on_each_interpreter!(@one $function: $($name)+);
            $($crate::on_each_interpreter!(@extra $function: $($more)+);)?
        }
    };
    (@extra $function:ident: $($name:ident)+) => {$(
        #[test]
        #[ignore = "needs an interpreter of `cargo xtask zoo --all`"]
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
