//! Pairs drawn from recordings of real programs (`tachyon/tests/profiles`): the short form of `cargo xtask differences`.

use std::path::Path;
use tachyon::analysis::diff::simulate::{Edit, Pool, Trials, binomial};
use tachyon::analysis::{Aggregate, Collector};
use tachyon::input::Source;

const PROGRAMS: [&str; 3] = ["orders", "batch", "served_by_three"];

/// Half a minute on each side, in runs of a second and a half as they were recorded.
const USUAL: Trials = Trials { pairs: 100, blocks: 120, run: 6, rounds: 100, seed: 1 };

fn pool(program: &str) -> Pool {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/profiles").join(program).with_extension("tach");
    let mut whole = Aggregate::default();
    Source::open(&[path]).unwrap().feed(&mut Collector::new(&mut whole)).unwrap();
    Pool::new(whole)
}

#[test]
fn a_real_program_does_not_differ_from_itself() {
    let (_, most) = binomial(0.01, USUAL.pairs);
    for program in PROGRAMS {
        let alarms = USUAL.alarms(&pool(program), Edit::None);
        println!("{program}: {alarms} of {}", USUAL.pairs);
        assert!(alarms <= most, "{program}: {alarms}");
    }
}

#[test]
fn moves_in_real_programs_and_other_rates_are_no_change() {
    let trials = Trials { pairs: 20, ..USUAL };
    let (_, most) = binomial(0.01, trials.pairs);
    for program in PROGRAMS {
        let pool = pool(program);
        let functions = pool.functions();
        let hottest = &*functions[0].0;
        for edit in [
            Edit::Renamed(hottest),
            Edit::Split(hottest),
            Edit::Inlined(hottest),
            Edit::Moved(hottest),
            Edit::Thinned(10),
        ] {
            let alarms = trials.alarms(&pool, edit);
            println!("{program}, {edit:?}: {alarms} of {}", trials.pairs);
            assert!(alarms <= most, "{program}, {edit:?}: {alarms}");
        }
    }
}

#[test]
fn five_percent_more_of_one_percent_is_found_where_that_was_promised() {
    let trials = Trials { pairs: 8, ..USUAL };
    let pool = pool("served_by_three");
    let (samples, found) = trials.found(&pool, &pool.functions()[0].0);
    println!("{samples:.0} samples a side: {found} of {}", trials.pairs);
    assert!((5e5..1e7).contains(&samples), "{samples}");
    // At least 6.4 are expected. That these eight pairs have as many is not chance: the same ones are drawn each time.
    assert!(found >= 6, "{found}");
}
