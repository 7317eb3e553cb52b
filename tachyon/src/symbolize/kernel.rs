//! Kernel addresses to function names, from `/proc/kallsyms`.

use std::io::{self, BufRead, BufReader};

/// The running kernel's functions, and those of its modules.
#[derive(Debug, Default)]
pub struct KernelSymbols {
    /// Sorted by address; each name ends where the next begins.
    functions: Vec<(u64, u32)>,
    names: String,
}

/// Most functions kept: a kernel with all its modules has some 200,000.
const MAX_FUNCTIONS: usize = 4_000_000;

impl KernelSymbols {
    /// Reads them. Empty if the kernel hides their addresses from this process (`kernel.kptr_restrict` without
    /// `CAP_SYSLOG`).
    ///
    /// # Errors
    /// When `/proc/kallsyms` cannot be read.
    pub fn read() -> io::Result<Self> {
        Self::parse(BufReader::new(std::fs::File::open("/proc/kallsyms")?))
    }

    /// Lines of `address type name [module]` (`kernel/kallsyms.c`, `s_show`).
    fn parse(mut lines: impl BufRead) -> io::Result<Self> {
        let mut found: Vec<(u64, String)> = Vec::new();
        let mut line = String::new();
        while found.len() < MAX_FUNCTIONS && lines.read_line(&mut line)? > 0 {
            let mut words = line.split_ascii_whitespace();
            let (address, kind, name) = (words.next(), words.next(), words.next());
            if let (Some(address), Some("t" | "T" | "w" | "W"), Some(name)) = (address, kind, name)
                && let Ok(address @ 1..) = u64::from_str_radix(address, 16)
            {
                let name = words.next().map_or_else(|| name.to_owned(), |module| format!("{name} {module}"));
                found.push((address, name));
            }
            line.clear();
        }
        // If an address has several names, the first is the one that the kernel's own messages show.
        found.sort_by_key(|(address, _)| *address);
        found.dedup_by_key(|(address, _)| *address);
        let mut symbols = Self::default();
        for (address, name) in found {
            symbols.functions.push((address, u32::try_from(symbols.names.len()).map_err(io::Error::other)?));
            symbols.names.push_str(&name);
        }
        Ok(symbols)
    }

    /// Whether the kernel shows nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// The function that holds an address, with its module in brackets.
    #[must_use]
    pub fn name(&self, address: u64) -> Option<&str> {
        let after = self.functions.partition_point(|(start, _)| *start <= address);
        let (_, start) = *self.functions.get(after.checked_sub(1)?)?;
        let end = self.functions.get(after).map_or(self.names.len(), |(_, end)| *end as usize);
        self.names.get(start as usize..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_by_any_address_inside() {
        let text = "ffff0000 T second\nffff0000 t second_too\nfffe0000 t first\nffff1000 D data\n\
                    ffff2000 t third\t[ext4]\n0 T hidden\nnonsense\n";
        let symbols = KernelSymbols::parse(text.as_bytes()).expect("text can be read");
        let names = [0xfffd_ffff, 0xfffe_0000, 0xffff_0010, 0xffff_1004, 0xffff_2001].map(|at| symbols.name(at));
        assert_eq!(names, [None, Some("first"), Some("second"), Some("second"), Some("third [ext4]")]);
    }

    #[test]
    fn hidden_addresses_are_no_symbols() {
        let symbols = KernelSymbols::parse("0000000000000000 T _stext\n".as_bytes()).expect("text can be read");
        assert!(symbols.is_empty());
    }
}
