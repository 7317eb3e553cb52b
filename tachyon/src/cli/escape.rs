//! Names from targets, made safe to show.
//!
//! A process may call itself, its functions and its files anything: terminal escapes, newlines that fake a line of this
//! program's output, right-to-left marks that reorder one. Every such name passes through [`escape`] before it reaches
//! a person.

pub use crate::sinks::text::escape_controls as escape;

#[cfg(test)]
mod tests {
    use super::escape;

    #[test]
    fn escapes_what_a_terminal_would_obey() {
        for (name, shown) in [
            ("main", "main"),
            ("<lambda>", "<lambda>"),
            ("größe 日本", "größe 日本"),
            ("a\nhint: rm -rf", "a\\nhint: rm -rf"),
            ("\x1b[2Jx\r\t", "\\x1b[2Jx\\r\\t"),
            ("\u{9b}31m", "\\u{9b}31m"),
            ("\u{202e}gpj.exe", "\\u{202e}gpj.exe"),
        ] {
            assert_eq!(escape(name), shown);
        }
    }
}
