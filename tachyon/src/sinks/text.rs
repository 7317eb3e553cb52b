//! Names from other programs, made harmless where they are shown.

use serde::Serialize;
use serde_json::ser::{CompactFormatter, Formatter, PrettyFormatter};
use std::borrow::Cow;
use std::fmt::Write as _;
use std::io;

/// The text with everything escaped that could move a cursor, end a line or reorder what is read: control characters
/// (`\n`, `\x1b`), line separators and bidirectional marks (`\u{202e}`).
#[must_use]
pub fn escape_controls(text: &str) -> Cow<'_, str> {
    escape(text, |_| false)
}

/// As [`escape_controls`], and also what `also` picks.
#[must_use]
pub fn escape(text: &str, also: impl Fn(char) -> bool) -> Cow<'_, str> {
    let must = |character: char| is_unsafe(character) || also(character);
    if !text.contains(must) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            _ if !must(character) => out.push(character),
            _ if character.is_ascii() => write_escape(&mut out, format_args!("\\x{:02x}", u32::from(character))),
            _ => write_escape(&mut out, format_args!("{}", character.escape_unicode())),
        }
    }
    Cow::Owned(out)
}

fn write_escape(out: &mut String, escape: std::fmt::Arguments<'_>) {
    out.write_fmt(escape).expect("a String takes every text");
}

/// Control characters (C0, DEL, C1), line and paragraph separators, marks that change the direction of text (UAX #9)
/// and zero-width characters.
#[must_use]
pub fn is_unsafe(character: char) -> bool {
    character.is_control()
        || matches!(character, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// JSON for people and programs, indented. In its strings everything [unsafe](is_unsafe) to show is written as
/// `\uXXXX`, which a JSON reader undoes: JSON itself only asks for that below U+0020, and a terminal obeys U+009B, too.
///
/// # Errors
/// When the value cannot be expressed in JSON, or `out` fails.
pub fn write_json<T: Serialize + ?Sized>(out: impl io::Write, value: &T) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(out, Harmless { like: PrettyFormatter::new() }))
}

/// JSON in one line, for programs, with the same escapes.
///
/// # Errors
/// As [`write_json`].
pub fn write_json_line<T: Serialize + ?Sized>(out: impl io::Write, value: &T) -> serde_json::Result<()> {
    let formatter = Harmless { like: CompactFormatter };
    value.serialize(&mut serde_json::Serializer::with_formatter(out, formatter))
}

/// The same as a text.
///
/// # Panics
/// When the value cannot be expressed in JSON.
pub fn json_line<T: Serialize + ?Sized>(value: &T) -> String {
    let mut text = Vec::new();
    write_json_line(&mut text, value).expect("strings, numbers and maps with string keys become JSON");
    String::from_utf8(text).expect("JSON is text")
}

/// The longest prefix of a name that fits in `most` bytes, with a mark that distinguishes it from others with the same
/// prefix.
#[must_use]
pub fn cut(text: &str, most: usize) -> Cow<'_, str> {
    if text.len() <= most {
        return Cow::Borrowed(text);
    }
    let end = text.floor_char_boundary(most);
    Cow::Owned(format!("{}…#{:08x}", &text[..end], crc32fast::hash(text.as_bytes())))
}

/// Wraps another formatter and adds escapes.
#[derive(Default)]
struct Harmless<F> {
    like: F,
}

impl<F: Formatter> Formatter for Harmless<F> {
    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.begin_array(writer)
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.end_array(writer)
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.like.begin_array_value(writer, first)
    }

    fn end_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.end_array_value(writer)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.begin_object(writer)
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.end_object(writer)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.like.begin_object_key(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.begin_object_value(writer)
    }

    fn end_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.like.end_object_value(writer)
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        // The serializer has already dealt with characters below U+0020. All others are in the basic plane.
        let mut rest = fragment;
        while let Some((place, character)) = rest.char_indices().find(|&(_, character)| is_unsafe(character)) {
            let (before, after) = rest.split_at(place);
            write!(writer, "{before}\\u{:04x}", u32::from(character))?;
            rest = after.strip_prefix(character).unwrap_or_default();
        }
        writer.write_all(rest.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes() {
        for (given, shown) in [
            ("plain <module>; ünïcödé 猫 \\n", "plain <module>; ünïcödé 猫 \\n"),
            ("a\nb\r\tc", "a\\nb\\r\\tc"),
            ("\x1b[31mred\x07\0", "\\x1b[31mred\\x07\\x00"),
            ("\u{9b}2J\u{202e}evil\u{2028}", "\\u{9b}2J\\u{202e}evil\\u{2028}"),
        ] {
            assert_eq!(escape_controls(given), shown);
        }
        assert_eq!(escape("a;b", |character| character == ';'), "a\\x3bb");
        assert!(matches!(escape_controls("a"), Cow::Borrowed(_)));
    }

    #[test]
    fn json_holds_nothing_a_terminal_obeys_and_reads_back_the_same() {
        let odd = "a\u{9b}31m\n\u{202e}\u{7f}\x1b \"q\" \u{feff}\u{1f40d}é";
        let value = serde_json::json!({ odd: [odd, {}, []] });
        let mut text = Vec::new();
        write_json(&mut text, &value).expect("it is JSON");
        let text = String::from_utf8(text).expect("JSON is text");
        assert!(!text.contains(|character| is_unsafe(character) && character != '\n'), "{text:?}");
        assert!(text.contains("\\u009b31m") && text.contains("🐍é"), "{text}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).expect("it is JSON"), value);
        let line = json_line(&value);
        assert!(!line.contains(is_unsafe) && !line.contains("\n "), "{line:?}");
        assert_eq!(serde_json::from_str::<serde_json::Value>(&line).expect("it is JSON"), value);
        let plain = serde_json::json!({"a": [1, 2.5, null, {"b": "c"}], "d": {}});
        assert_eq!(json_line(&plain), plain.to_string());
    }

    #[test]
    fn long_names_are_cut_and_stay_apart() {
        assert_eq!(cut("short", 5), "short");
        let names = ["猫".repeat(100), "猫".repeat(101)];
        let [a, b] = [cut(&names[0], 20), cut(&names[1], 20)];
        assert!(a.starts_with("猫猫猫猫猫猫…#") && a.len() < 40, "{a}");
        assert_ne!(a, b);
    }
}
