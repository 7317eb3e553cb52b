//! Keys → actions. The table of [`HELP`] is what `?` shows and `docs/top.md` lists.

use super::model::{Action, Mode, Tab};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// Keys and what they do.
pub const HELP: [(&str, &str); 14] = [
    ("q, Ctrl-C", "quit"),
    ("p, space", "pause the view; sampling goes on"),
    ("1 2 3 4", "sort by this column"),
    ("/", "show only rows that match a regular expression; Esc ends that"),
    ("left, right", "step through the threads"),
    ("up, down", "select a row; also PgUp, PgDn, Home, End"),
    ("Enter", "of a thread, process or task: only its samples; Esc: all again"),
    ("Tab", "next table; Shift-Tab the one before"),
    ("f l t P T", "functions, lines, threads, processes, asyncio tasks (--async)"),
    ("n", "native code below the Python function that called it"),
    ("w", "write what was seen as a TACH file into this directory"),
    ("Ctrl-L", "draw the screen anew"),
    ("Ctrl-Z", "suspend"),
    ("?, h", "this help"),
];

/// What a key does, if anything.
#[must_use]
pub fn action(key: &KeyEvent, mode: &Mode) -> Option<Action> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c') => Some(Action::Quit),
            KeyCode::Char('l') => Some(Action::Redraw),
            KeyCode::Char('z') => Some(Action::Suspend),
            KeyCode::Char('u') if matches!(mode, Mode::Typing(_)) => Some(Action::EraseAll),
            KeyCode::Char('h') if matches!(mode, Mode::Typing(_)) => Some(Action::Erase),
            _ => None,
        };
    }
    match mode {
        Mode::Typing(_) => match key.code {
            KeyCode::Enter => Some(Action::Accept),
            KeyCode::Esc => Some(Action::Back),
            KeyCode::Backspace => Some(Action::Erase),
            KeyCode::Char(character) => Some(Action::Type(character)),
            _ => None,
        },
        // Any key ends the help, and here that includes `q`.
        Mode::Help => Some(Action::Back),
        Mode::Table => table(key.code),
    }
}

fn table(code: KeyCode) -> Option<Action> {
    Some(match code {
        KeyCode::Char('q') => Action::Quit,
        KeyCode::Char('p' | ' ') => Action::Pause,
        KeyCode::Char('1') => Action::Sort(0),
        KeyCode::Char('2') => Action::Sort(1),
        KeyCode::Char('3') => Action::Sort(2),
        KeyCode::Char('4') => Action::Sort(3),
        KeyCode::Char('/') => Action::Filter,
        KeyCode::Char('n') => Action::Native,
        KeyCode::Char('w') => Action::Write,
        KeyCode::Char('?' | 'h') => Action::Help,
        KeyCode::Char('f') => Action::Show(Tab::Functions),
        KeyCode::Char('l') => Action::Show(Tab::Lines),
        KeyCode::Char('t') => Action::Show(Tab::Threads),
        KeyCode::Char('P') => Action::Show(Tab::Processes),
        KeyCode::Char('T') => Action::Show(Tab::Tasks),
        KeyCode::Tab => Action::NextTab(1),
        KeyCode::BackTab => Action::NextTab(-1),
        KeyCode::Left => Action::Thread(-1),
        KeyCode::Right => Action::Thread(1),
        KeyCode::Up | KeyCode::Char('k') => Action::Select(-1),
        KeyCode::Down | KeyCode::Char('j') => Action::Select(1),
        KeyCode::PageUp => Action::Select(-10),
        KeyCode::PageDown => Action::Select(10),
        KeyCode::Home => Action::Select(isize::MIN),
        KeyCode::End => Action::Select(isize::MAX),
        KeyCode::Enter => Action::Enter,
        KeyCode::Esc => Action::Back,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn press(code: KeyCode, modifiers: KeyModifiers, mode: &Mode) -> Option<Action> {
        action(&KeyEvent::new(code, modifiers), mode)
    }

    #[test]
    fn keys_mean_what_the_contract_says() {
        let plain = |code| press(code, KeyModifiers::NONE, &Mode::Table);
        for (code, expected) in [
            (KeyCode::Char('q'), Action::Quit),
            (KeyCode::Char('p'), Action::Pause),
            (KeyCode::Char('1'), Action::Sort(0)),
            (KeyCode::Char('4'), Action::Sort(3)),
            (KeyCode::Char('/'), Action::Filter),
            (KeyCode::Right, Action::Thread(1)),
            (KeyCode::Left, Action::Thread(-1)),
            (KeyCode::Char('n'), Action::Native),
            (KeyCode::Char('w'), Action::Write),
            (KeyCode::Char('?'), Action::Help),
        ] {
            assert_eq!(plain(code), Some(expected), "{code:?}");
        }
        assert_eq!(plain(KeyCode::Char('x')), None);
    }

    #[test]
    fn what_is_typed_into_a_filter_is_no_command() {
        let typing = Mode::Typing("a".to_owned());
        for letter in ['q', 'p', '1', '/', '?'] {
            assert_eq!(press(KeyCode::Char(letter), KeyModifiers::NONE, &typing), Some(Action::Type(letter)));
        }
        for mode in [Mode::Table, typing, Mode::Help] {
            assert_eq!(press(KeyCode::Char('c'), KeyModifiers::CONTROL, &mode), Some(Action::Quit), "{mode:?}");
        }
    }
}
