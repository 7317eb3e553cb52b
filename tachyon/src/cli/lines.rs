//! Lines for a terminal: one that is too wide is cut, so that a name of a thousand letters does not push away the rest.

use std::io::{self, IsTerminal as _, Write};

/// Columns of the terminal if standard output is one; otherwise `None`: files and pipes get whole lines.
pub fn terminal_width() -> Option<usize> {
    let out = console::Term::stdout();
    io::stdout().is_terminal().then(|| out.size_checked().map(|(_, columns)| usize::from(columns))).flatten()
}

/// Cuts lines on their way to a terminal.
pub struct Lines<'a> {
    out: &'a mut dyn Write,
    width: Option<usize>,
    line: Vec<u8>,
}

impl<'a> Lines<'a> {
    /// `width`: most columns, if there is such a limit.
    pub fn new(out: &'a mut dyn Write, width: Option<usize>) -> Self {
        Self { out, width, line: Vec::new() }
    }
}

impl Write for Lines<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(width) = self.width else { return self.out.write(bytes) };
        for part in bytes.split_inclusive(|&byte| byte == b'\n') {
            match part.strip_suffix(b"\n") {
                None => self.line.extend_from_slice(part),
                Some(end) => {
                    self.line.extend_from_slice(end);
                    let line = String::from_utf8_lossy(&self.line);
                    writeln!(self.out, "{}", console::truncate_str(&line, width, "…"))?;
                    self.line.clear();
                }
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_cut_at_the_width_and_nowhere_else() {
        let written = |width| {
            let mut out = Vec::new();
            let mut lines = Lines::new(&mut out, width);
            write!(lines, "short\nlong ").unwrap();
            writeln!(lines, "long 猫猫猫").unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(None), "short\nlong long 猫猫猫\n");
        assert_eq!(written(Some(13)), "short\nlong long 猫…\n");
        assert_eq!(written(Some(80)), written(None));
    }
}
