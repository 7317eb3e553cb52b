//! Symbolizing: code address and instruction to function, file, line and columns.
//!
//! In: code objects as they were copied when first seen ([`Symbolizer::add_code`]) and the frames of samples
//! ([`Symbolizer::frame`]), in any order. Out: frames of the [profile](crate::profile). A frame whose code object is
//! not known yet is pending there, and gets its names when they arrive, or CPython's `<unknown function>` at the end
//! ([`Symbolizer::finish`]). What does not arrive can be read from the live process ([`Symbolizer::missing`]).
//!
//! This module knows nothing about BPF. It trusts no size and no byte from a target, and escapes nothing: names go into
//! the profile as they are.

mod cache;
mod code_object;
mod kernel;
pub mod linetable;
pub mod native;
mod symbolizer;
pub mod text;

pub use code_object::{BadCodeRecord, CodeKey, MAX_LINETABLE_BYTES, ReadCodeError};
pub use kernel::KernelSymbols;
pub use symbolizer::{ImageHealth, Missing, Symbolizer};
pub use text::{CUT_MARK, decode as decode_text};
