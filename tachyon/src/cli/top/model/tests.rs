use super::super::testing::{HOLDS, PID, WITHOUT, model, model_with, taken, usual};
use super::*;
use crate::analysis::{By, Filter, NoDistributions, report};

fn names(model: &Model) -> Vec<&str> {
    model.rows().iter().map(|row| row.name.as_str()).collect()
}

fn row<'a>(model: &'a Model, name: &str) -> &'a TableRow {
    let found = model.rows().iter().find(|row| row.name == name);
    found.unwrap_or_else(|| panic!("no {name} in {:?}", names(model)))
}

fn numbers(row: &TableRow) -> [f64; 4] {
    row.numbers.map(|number| number.expect("it is known"))
}

/// Equal up to rounding errors.
fn close(a: &[f64], b: &[f64]) {
    assert!(a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-6), "{a:?} is not {b:?}");
}

#[test]
fn the_window_slides_and_the_whole_does_not() {
    let mut model = model();
    model.add(&usual());
    close(&numbers(row(&model, "lead")), &[0.6, 0.6, 1.2, 1.2]);
    close(&numbers(row(&model, "main")), &[0.0, 0.85, 0.0, 1.7]);
    close(&numbers(row(&model, "pack")), &[0.25, 0.25, 0.5, 0.5]);
    let own: f64 = model.rows().iter().map(|row| numbers(row)[0]).sum();
    close(&[own], &[1.0]);
    for _ in 0..2 {
        model.add(&taken(&[(0, &["late:40", "main:5"], HOLDS, 100)]));
    }
    assert_eq!(names(&model)[..2], ["late", "main"]);
    close(&numbers(row(&model, "late")), &[1.0, 1.0, 2.0, 2.0]);
    close(&numbers(row(&model, "lead")), &[0.0, 0.0, 1.2, 1.2]);
    let (window, whole) = model.shares();
    assert_eq!((window.sum.samples, whole.sum.samples), (200, 400));
    close(&[window.cpus(), window.profiler(), window.gil.unwrap_or(0.0)], &[0.5, 0.01, 1.0]);
    close(&[whole.gil.unwrap_or(0.0), whole.native, whole.seconds], &[0.875, 0.125, 6.0]);
}

#[test]
fn columns_sort() {
    let mut model = model();
    model.add(&usual());
    model.add(&usual());
    model.add(&taken(&[(0, &["late:40", "main:5"], HOLDS, 20)]));
    for (column, leader) in [(0, "lead"), (1, "main"), (2, "lead"), (3, "main")] {
        assert_eq!(model.apply(Action::Sort(column)), Effect::None);
        assert_eq!((model.sorted_by(), names(&model)[0]), (column, leader));
        let sorted: Vec<f64> = model.rows().iter().map(|row| numbers(row)[column]).collect();
        assert!(sorted.is_sorted_by(|a, b| a >= b), "{column}: {sorted:?}");
    }
    // Each kind of table is sorted on its own.
    model.apply(Action::Show(Tab::Threads));
    assert_eq!(model.sorted_by(), 0);
}

#[test]
fn lines_are_told_apart_and_functions_have_their_hottest() {
    let mut model = model();
    model.add(&usual());
    assert_eq!(row(&model, "lead").place, "/srv/app.py:10");
    model.apply(Action::Show(Tab::Lines));
    let lead: Vec<_> = model.rows().iter().filter(|row| row.name == "lead").collect();
    assert_eq!(lead.iter().map(|row| row.place.as_str()).collect::<Vec<_>>(), ["/srv/app.py:10", "/srv/app.py:11"]);
    close(&[numbers(lead[0])[0], numbers(lead[1])[0]], &[0.45, 0.15]);
}

#[test]
fn a_filter_hides_rows_and_changes_no_number() {
    let mut model = model();
    model.add(&usual());
    let before = row(&model, "pack").clone();
    model.apply(Action::Filter);
    for character in "PAck".chars() {
        model.apply(Action::Type(character));
    }
    assert!(names(&model).is_empty(), "a capital letter is meant");
    model.apply(Action::EraseAll);
    for character in "(pack|serve".chars() {
        model.apply(Action::Type(character));
    }
    assert_eq!(model.said(), Some("not a regular expression yet"));
    model.apply(Action::Type(')'));
    assert_eq!((model.said(), model.filter()), (None, "(pack|serve)"));
    assert_eq!(names(&model), ["pack", "serve"]);
    assert_eq!(*row(&model, "pack"), before);
    model.apply(Action::Accept);
    assert_eq!((model.mode(), model.filter()), (&Mode::Table, "(pack|serve)"));
    model.add(&usual());
    assert_eq!(names(&model), ["pack", "serve"], "it holds for what comes later");
    model.apply(Action::Back);
    assert_eq!((model.filter(), model.rows().len()), ("", 5));
}

#[test]
fn a_paused_view_stands_still_and_misses_nothing() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Pause);
    let before = model.rows().to_vec();
    for _ in 0..3 {
        model.add(&taken(&[(0, &["late:40", "main:5"], HOLDS, 100)]));
    }
    assert_eq!(model.rows(), before);
    // Other tables can be shown all the same.
    model.apply(Action::Show(Tab::Lines));
    model.apply(Action::Show(Tab::Functions));
    assert_eq!(model.rows(), before);
    assert_eq!(model.shares().1.sum.samples, 200);
    model.apply(Action::Pause);
    assert_eq!(model.shares().1.sum.samples, 500);
    assert_eq!(names(&model)[0], "late");
}

#[test]
fn arrows_step_through_threads() {
    let mut model = model();
    model.add(&usual());
    let step = |model: &mut Model, by| {
        model.apply(Action::Thread(by));
        (model.scope_name(), model.shares().0.sum.samples)
    };
    let (main, worker) = (format!("main (tid {PID})"), format!("worker (tid {})", PID + 1));
    assert_eq!(step(&mut model, 1), (main.clone(), 170));
    assert_eq!(step(&mut model, 1), (worker.clone(), 30));
    assert_eq!(names(&model), ["wait", "serve"]);
    close(&numbers(row(&model, "wait")), &[1.0, 1.0, 0.3, 0.3]);
    assert_eq!(step(&mut model, 1), ("all threads".to_owned(), 200));
    assert_eq!(step(&mut model, -1), (worker, 30));
    assert_eq!(step(&mut model, -1), (main, 170));
    model.apply(Action::Back);
    assert_eq!(model.scope_name(), "all threads");
}

#[test]
fn threads_and_processes_have_rows_that_lead_to_their_samples() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Show(Tab::Threads));
    let (main, worker) = (format!("main (tid {PID})"), format!("worker (tid {})", PID + 1));
    assert_eq!(names(&model), [&main, &worker]);
    // 1.7 s of CPU time in 2 s, of which 1.2 s with the GIL.
    close(&numbers(row(&model, &main)), &[0.85, 0.6, 1.7, 1.2]);
    model.apply(Action::Select(1));
    model.apply(Action::Enter);
    assert_eq!((model.tab(), model.scope_name()), (Tab::Functions, worker));
    assert_eq!(names(&model), ["wait", "serve"]);
    model.apply(Action::Back);
    model.apply(Action::Show(Tab::Processes));
    assert_eq!(names(&model), [format!("python3 app.py ({PID})")]);
    close(&numbers(&model.rows()[0]), &[1.0, 0.75, 2.0, 1.5]);
    model.apply(Action::Enter);
    assert_eq!(model.rows().len(), 5);
}

#[test]
fn the_selected_row_stays_selected() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Select(1));
    assert_eq!(model.rows()[model.selected()].name, "pack");
    model.add(&taken(&[(0, &["late:40", "main:5"], HOLDS, 100)]));
    assert_eq!(model.rows()[model.selected()].name, "pack");
    model.apply(Action::Select(isize::MAX));
    assert_eq!(model.selected() + 1, model.rows().len());
    model.apply(Action::Select(isize::MIN));
    assert_eq!(model.selected(), 0);
}

#[test]
fn native_code_is_a_part_of_its_caller() {
    let mut model = model();
    model.add(&usual());
    let pack = row(&model, "pack");
    assert_eq!(pack.native, [(0.25, "deflate".to_owned(), "libz.so.1".to_owned())]);
    assert!(!model.native());
    model.apply(Action::Native);
    assert!(model.native());
    let mut without = model_with(Sampled::default());
    without.apply(Action::Native);
    assert!(!without.native() && without.said().is_some_and(|said| said.contains("--no-native")));
}

#[test]
fn tasks_have_what_they_ran_and_what_they_await() {
    let mut model = model_with(Sampled { native: true, tasks: true });
    model.add(&taken(&[
        (0, &["parse:10", "fetch:11", "<task> fetch (2 parents)", "serve:20", "<task> serve"], HOLDS, 60),
        (0, &["serve:21", "<task> serve"], HOLDS, 30),
        (0, &["select:40", "run:41"], WITHOUT, 10),
    ]));
    model.apply(Action::Show(Tab::Tasks));
    let rows: Vec<_> = model.rows().iter().map(|row| (row.name.as_str(), row.numbers[0], row.numbers[1])).collect();
    let share = |share| Some(share);
    assert_eq!(
        rows,
        [("fetch", share(0.6), share(0.6)), ("serve", share(0.3), share(0.9)), ("<no task>", share(0.1), share(0.1))]
    );
    assert_eq!(model.rows().iter().filter(|row| row.is_task()).count(), 2);
    model.apply(Action::Sort(1));
    assert_eq!(model.rows()[0].name, "serve");
    model.apply(Action::Enter);
    assert_eq!((model.tab(), model.scope_name().as_str()), (Tab::Functions, "task serve"));
    assert_eq!(model.shares().0.sum.samples, 90, "its own, and those of what it awaits");
    assert!(model.rows().iter().all(|row| row.name != "select"));
    model.apply(Action::Back);
    assert_eq!(model.shares().0.sum.samples, 100);

    let mut without = model_with(Sampled::default());
    without.apply(Action::Show(Tab::Tasks));
    assert!(without.tab() == Tab::Functions && without.said().is_some_and(|said| said.contains("--async")));
    without.apply(Action::NextTab(-1));
    assert_eq!(without.tab(), Tab::Processes);
}

#[test]
fn tables_go_round_and_the_end_is_told() {
    let mut model = model();
    for expected in [Tab::Lines, Tab::Threads, Tab::Processes, Tab::Functions] {
        model.apply(Action::NextTab(1));
        assert_eq!(model.tab(), expected);
    }
    model.apply(Action::NextTab(-1));
    assert_eq!(model.tab(), Tab::Processes);
    model.over("all processes have ended".to_owned());
    model.over("something later".to_owned());
    assert_eq!(model.is_over(), Some("all processes have ended"));
    assert_eq!(model.apply(Action::Write), Effect::Write);
    assert_eq!(model.apply(Action::Quit), Effect::Quit);
}

#[test]
fn a_file_of_what_was_seen_holds_each_sample() {
    let mut model = model();
    model.add(&usual());
    model.apply(Action::Pause);
    model.add(&usual());
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("seen.tach");
    assert_eq!(model.seen().write(&path).unwrap(), 400, "also what came while it was paused");
    let aggregate = crate::cli::profiles::as_one(std::slice::from_ref(&path), None, false).unwrap();
    assert_eq!(aggregate.samples(), 400);
    let report = report(&aggregate, By::Function, &Filter::default(), false, &NoDistributions);
    assert_eq!(
        report.rows.iter().map(|row| (row.name.name.as_str(), row.own.samples)).take(2).collect::<Vec<_>>(),
        [("lead", 240), ("pack", 100)]
    );
    assert!(model.seen().write(&path).is_err(), "nothing is replaced");
}
