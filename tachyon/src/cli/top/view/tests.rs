use super::super::model::Action;
use super::super::testing::{HOLDS, RAISES, model, taken, usual};
use super::*;
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::buffer::Buffer;

fn drawn(model: &Model, (width, height): (u16, u16), colours: bool) -> Buffer {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, model, colours)).unwrap();
    terminal.backend().buffer().clone()
}

fn lines(model: &Model, size: (u16, u16)) -> Vec<String> {
    let buffer = drawn(model, size, true);
    let row = |y| (0..size.0).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..size.1).map(|y| row(y).trim_end().to_owned()).collect()
}

const SMALL: (u16, u16) = (80, 24);
const LARGE: (u16, u16) = (200, 50);

#[test]
fn a_small_screen_shows_what_matters() {
    let mut model = model();
    model.add(&usual());
    let shown = lines(&model, SMALL);
    let expected = [
        "tachyon-bpf top · python3 app.py · 99 Hz · 0:02",
        "CPUs 1.00                              █  GIL 75.0 %  GC 0.0 %  native 25.0 %",
        "2 s: 200 samples · all: 200 · none lost · profiler 1.0 % of a CPU",
        "Tab  functions  lines  threads  processes   all threads",
        "▼1 SELF  2 TOTAL  3 SELF s  4 TOTAL s  FUNCTION              FILE, HOTTEST LINE",
        " 60.0 %   60.0 %      1.20       1.20  lead                  /srv/app.py:10",
        " 25.0 %   25.0 %      0.50       0.50  pack                  /srv/app.py:20",
        " 15.0 %   15.0 %      0.30       0.30  wait                  /srv/app.py:30",
        "  0.0 %   85.0 %      0.00       1.70  main                  /srv/app.py",
        "  0.0 %   15.0 %      0.00       0.30  serve                 /srv/app.py",
    ];
    assert_eq!(shown[..10], expected);
    assert_eq!(shown[23], "q quit  p pause  1-4 sort  / filter  ←→ threads  n native  w write  ? help");
}

#[test]
fn a_large_screen_has_room_for_histories() {
    let mut model = model();
    model.add(&taken(&[(0, &["main:5"], HOLDS, 200)]));
    model.add(&usual());
    let shown = lines(&model, LARGE);
    assert!(shown[4].contains("LAST MINUTE"), "{}", shown[4]);
    let lead = shown.iter().find(|line| line.contains(" lead ")).unwrap();
    let main = shown.iter().find(|line| line.contains(" main ")).unwrap();
    // 60 % of the highest is level 5 of 8; `main` had all of the first step and nothing of the second.
    assert!(lead.contains("   ▅  lead") && main.contains("  █   main"), "{lead}\n{main}");
    assert!(shown.iter().all(|line| line.chars().count() <= 200));
}

#[test]
fn exceptions_are_shown_where_there_are_any() {
    let mut model = model();
    model.add(&taken(&[(0, &["libz.so.1!crc32", "fails:7"], RAISES, 50), (0, &["fine:8"], HOLDS, 150)]));
    let shown = &lines(&model, SMALL)[1];
    assert!(shown.ends_with("█  GIL 100.0 %  GC 0.0 %  native 25.0 %  exceptions 25.0 %"), "{shown}");
}

#[test]
fn the_sorted_column_is_marked() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Sort(3));
    let shown = lines(&model, SMALL);
    assert!(shown[4].starts_with(" 1 SELF  2 TOTAL  3 SELF s ▼4 TOTAL s "), "{}", shown[4]);
    assert!(shown[5].contains(" main "), "{}", shown[5]);
    model.apply(Action::Show(Tab::Threads));
    let shown = lines(&model, SMALL);
    assert!(shown[4].starts_with(" ▼1 CPU    2 GIL   3 CPU s    4 GIL s  THREAD"), "{}", shown[4]);
    assert!(shown[5].starts_with(" 85.0 %   60.0 %      1.70       1.20  main (tid 4242)"), "{}", shown[5]);
}

#[test]
fn native_code_lies_below_its_caller() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Native);
    let shown = lines(&model, SMALL);
    let pack = shown.iter().position(|line| line.contains(" pack ")).unwrap();
    assert_eq!(shown[pack + 1], " 25.0 %                                  deflate             libz.so.1");
}

#[test]
fn help_fits_and_lists_the_keys_of_the_contract() {
    let mut model = model();
    model.apply(Action::Help);
    let shown = lines(&model, SMALL);
    for (keys, what) in HELP {
        let fits = |line: &String| line.starts_with(&format!("  {keys}")) && line.trim_end().ends_with(what);
        assert!(shown.iter().any(fits), "{keys}: {shown:#?}");
    }
    assert!(shown.iter().any(|line| line.ends_with("Any key goes back.")), "{shown:#?}");
}

#[test]
fn nothing_is_said_to_be_nothing() {
    let mut model = model();
    assert!(lines(&model, SMALL)[5].contains("starting"));
    model.add(&taken(&[]));
    assert!(lines(&model, SMALL)[5].contains("none of its threads ran on a CPU"));
    model.over("all processes have ended".to_owned());
    let shown = lines(&model, SMALL);
    assert!(shown[0].ends_with("ENDED") && shown[23].starts_with("all processes have ended"), "{shown:#?}");
    model.apply(Action::Pause);
    assert!(lines(&model, SMALL)[0].ends_with("PAUSED"));
}

#[test]
fn a_scrolled_table_shows_the_selected_row() {
    let names: Vec<String> = (0..100).map(|number| format!("f{number:02}:1")).collect();
    let stacks: Vec<[&str; 1]> = names.iter().map(|name| [name.as_str()]).collect();
    let seen: Vec<_> = stacks.iter().zip(0..).map(|(stack, at)| (0, &stack[..], HOLDS, 200 - at)).collect();
    let mut model = model();
    model.add(&taken(&seen));
    model.apply(Action::Select(50));
    let shown = lines(&model, SMALL);
    assert!(shown[22].contains(" f50 ") && shown[5].contains(" f33 "), "{shown:#?}");
    model.apply(Action::Select(isize::MAX));
    assert!(lines(&model, SMALL)[22].contains(" f99 "));
}

#[test]
fn names_of_programs_move_no_cursor() {
    let mut model = model();
    model.add(&taken(&[(0, &["\x1b[2Jevil\n\u{202e}:1"], HOLDS, 10)]));
    let shown = lines(&model, LARGE).join("|");
    assert!(shown.contains("\\x1b[2Jevil\\n\\u{202e}") && !shown.contains(['\x1b', '\n', '\u{202e}']), "{shown}");
}

#[test]
fn colours_only_where_they_are_wanted() {
    let mut model = model();
    model.add(&usual());
    let coloured = |colours| {
        let buffer = drawn(&model, SMALL, colours);
        buffer.content().iter().filter(|cell| cell.fg != Color::Reset || cell.bg != Color::Reset).count()
    };
    assert!(coloured(true) > 0);
    assert_eq!(coloured(false), 0);
}

#[test]
fn any_size_can_be_drawn() {
    let mut model = model();
    for filled in [false, true] {
        if filled {
            model.add(&usual());
            model.apply(Action::Native);
        }
        for action in [Action::Show(Tab::Lines), Action::Show(Tab::Threads), Action::Filter, Action::Help] {
            model.apply(action);
            for width in [1, 2, 10, 39, 40, 79, 120, 300] {
                for height in [1, 2, 5, 6, 24] {
                    drawn(&model, (width, height), true);
                }
            }
        }
        model.apply(Action::Back);
    }
}
