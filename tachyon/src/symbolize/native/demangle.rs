//! Turns names as compilers write them into names as programmers do.

use std::fmt::{self, Write};

use cpp_demangle::{BorrowedSymbol, DemangleOptions, ParseOptions};

/// Longest mangled name that is looked at, in bytes; a longer one is shown as it is, cut.
const MAX_MANGLED: usize = 8 << 10;

/// Longest name that comes out: a short mangled name can stand for gigabytes.
const MAX_NAME: usize = 4 << 10;

/// How deep C++ names may nest. `cpp_demangle` tries one reading after the other at each level: with 128 levels a name of eighty
/// bytes took ten seconds, and every three further bytes doubled that. None of 21,000 names of libarrow, libparquet and
/// libstdc++ needs more than 80.
const MAX_DEPTH: u32 = 80;

/// Most `new` expressions (`nw`, `na`), or what looks like them, in a C++ name: `cpp_demangle` reads each in two ways, so that 25 of
/// them took five seconds. None of the names above has as many.
const MAX_NEW: usize = 15;

/// A function's name for people: Rust without the hash, C++ without parameters and return type, and without the
/// suffixes that compilers append to parts and copies of a function.
#[must_use]
pub fn demangle(raw: &[u8]) -> String {
    let raw = &raw[..raw.len().min(MAX_MANGLED)];
    // The version of a symbol (`read@@GLIBC_2.2.5`) only matters to the linker.
    let unversioned = raw.split(|&byte| byte == b'@').next().filter(|name| !name.is_empty()).unwrap_or(raw);
    let name = without_clone_suffix(unversioned);
    let text = String::from_utf8_lossy(name);
    rust(&text).or_else(|| cpp(name)).unwrap_or_else(|| {
        let mut plain = Bounded::default();
        // The only possible error is that what does not fit is cut.
        let _cut = plain.write_str(&text);
        plain.0
    })
}

fn rust(name: &str) -> Option<String> {
    let demangled = rustc_demangle::try_demangle(name).ok()?;
    let mut text = Bounded::default();
    write!(text, "{demangled:#}").ok()?;
    Some(text.0)
}

fn cpp(name: &[u8]) -> Option<String> {
    if !name.starts_with(b"_Z") {
        return None;
    }
    let new = name.windows(2).filter(|pair| [b"nw", b"na"].iter().any(|new| pair == *new)).count();
    if new > MAX_NEW {
        return None;
    }
    let parsing = ParseOptions::default().recursion_limit(MAX_DEPTH);
    let (symbol, _suffix) = BorrowedSymbol::with_tail_and_options(name, &parsing).ok()?;
    let options = DemangleOptions::new().no_params().no_return_type().recursion_limit(MAX_DEPTH);
    let mut text = Bounded::default();
    symbol.structured_demangle(&mut text, &options).ok()?;
    Some(text.0)
}

/// Cuts what GCC and LLVM append: `.cold`, `.part.3`, `.constprop.0`, `.isra.0`, `.lto_priv.1`, `.llvm.1234`, …
fn without_clone_suffix(name: &[u8]) -> &[u8] {
    const SUFFIXES: [&[u8]; 7] =
        [b".cold", b".part.", b".constprop.", b".isra.", b".lto_priv.", b".llvm.", b".localalias"];
    let cut = SUFFIXES.iter().filter_map(|suffix| memchr::memmem::find(name, suffix)).min();
    // A name is more than a suffix.
    cut.filter(|&at| at > 0).map_or(name, |at| &name[..at])
}

/// Text of bounded length.
#[derive(Default)]
struct Bounded(String);

impl Write for Bounded {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if self.0.len() + text.len() <= MAX_NAME {
            self.0.push_str(text);
            return Ok(());
        }
        let mut end = MAX_NAME - self.0.len();
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        self.0.push_str(&text[..end]);
        Err(fmt::Error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_as_programmers_write_them() {
        for (raw, wanted) in [
            ("PyDict_GetItem", "PyDict_GetItem"),
            ("_PyEval_EvalFrameDefault.cold", "_PyEval_EvalFrameDefault"),
            ("unicode_concatenate.part.0.constprop.3", "unicode_concatenate"),
            (".cold", ".cold"),
            ("read@@GLIBC_2.2.5", "read"),
            ("_ZN4core3fmt9Formatter9write_str17h0123456789abcdefE", "core::fmt::Formatter::write_str"),
            ("_RNvC6_123foo3bar", "123foo::bar"),
            ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<int, std::allocator<int> >::push_back"),
            ("_ZN5arrow7compute4CallERKSs.isra.0", "arrow::compute::Call"),
            ("_Zjunk", "_Zjunk"),
        ] {
            assert_eq!(demangle(raw.as_bytes()), wanted, "{raw}");
        }
    }

    /// Names that make a parser backtrack again and again: at a depth of 128 the longest of these took minutes in this
    /// build.
    #[test]
    fn a_name_with_many_readings_is_cut_short() {
        for (begin, part) in
            [("_Z1fD0T_D0", "C1I"), ("_Z1fDT", "nw"), ("_Z1fDT", "na"), ("_ZptL", "SaI"), ("_ZB1xIi", "Iv1aquS0_")]
        {
            for parts in 1..40 {
                for ends in [0, parts] {
                    let name = format!("{begin}{}{}", part.repeat(parts), "E".repeat(ends));
                    let shown = demangle(name.as_bytes());
                    assert!(!shown.is_empty() && shown.len() <= MAX_NAME, "{name}: {shown}");
                }
            }
        }
        // Names that compilers write can be read.
        let deep = (0..8).fold("i".to_owned(), |inner, _| format!("St6vectorI{inner}E"));
        assert!(demangle(format!("_Z1fI{deep}EvT_").as_bytes()).starts_with("f<std::vector<std::vector<"));
    }

    #[test]
    fn a_name_that_grows_is_cut() {
        let bomb = format!("_ZN1aI{}1bE1cEv", "NS_I".repeat(2000));
        assert!(demangle(bomb.as_bytes()).len() <= MAX_NAME.max(bomb.len()));
        assert_eq!(demangle(&vec![b'x'; 1 << 20]).len(), MAX_NAME);
        assert_eq!(demangle("é".repeat(MAX_NAME).as_bytes()).len(), MAX_NAME);
    }
}
