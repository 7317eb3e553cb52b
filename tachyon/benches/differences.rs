//! Trials of `diff`'s statistics on real recordings, for `cargo xtask differences`. Prints one JSON object a line.
//!
//! `same|moved|rate|found PAIRS BLOCKS RUN FILE...` draws pairs from the files (`analysis::diff::simulate`); `pairs FILE...` compares
//! each file with each other one.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tachyon::analysis::diff::simulate::{Edit, Pool, Trials, binomial};
use tachyon::analysis::diff::{Difference, Options, diff};
use tachyon::analysis::{Aggregate, Collector, NoDistributions};
use tachyon::input::Source;

fn main() -> Result<()> {
    // `cargo bench` passes `--bench` to every benchmark, also to those without a harness.
    let words: Vec<String> = std::env::args().skip(1).filter(|word| word != "--bench").collect();
    match words.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["pairs", ref files @ ..] => pairs(files),
        [what, pairs, blocks, run, ref files @ ..] if !files.is_empty() => {
            let trials =
                Trials { pairs: pairs.parse()?, blocks: blocks.parse()?, run: run.parse()?, rounds: 1000, seed: 1 };
            drawn(what, trials, files)
        }
        // Run by hand without words there is nothing to measure.
        [] => Ok(()),
        _ => bail!("same|moved|rate|found PAIRS BLOCKS RUN FILE..., or pairs FILE..."),
    }
}

fn add(file: &str, into: &mut Aggregate) -> Result<()> {
    let source = Source::open(&[PathBuf::from(file)]).with_context(|| format!("cannot read {file}"))?;
    source.feed(&mut Collector::new(into)).with_context(|| format!("cannot read {file}"))?;
    Ok(())
}

fn drawn(what: &str, trials: Trials, files: &[&str]) -> Result<()> {
    let mut whole = Aggregate::default();
    for file in files {
        add(file, &mut whole)?;
    }
    let pool = Pool::new(whole);
    let functions = pool.functions();
    let hottest = &*functions.first().context("no function of Python has samples")?.0;
    let pairs = trials.pairs;
    let tell = |trial: &str, alarms: u64| {
        let (_, most) = binomial(0.01, pairs);
        println!("{}", json!({ "trial": trial, "pairs": pairs, "count": alarms, "most": most }));
    };
    match what {
        "same" => tell("same", trials.alarms(&pool, Edit::None)),
        "moved" => {
            for (name, edit) in [
                ("renamed", Edit::Renamed(hottest)),
                ("split", Edit::Split(hottest)),
                ("inlined", Edit::Inlined(hottest)),
                ("moved", Edit::Moved(hottest)),
            ] {
                tell(name, trials.alarms(&pool, edit));
            }
        }
        "rate" => tell("rate", trials.alarms(&pool, Edit::Thinned(10))),
        "found" => {
            let (samples, found) = trials.found(&pool, hottest);
            let (least, _) = binomial(0.8, pairs);
            let samples = samples.round();
            println!(
                "{}",
                json!({ "trial": what, "pairs": pairs, "count": found, "least": least, "samples": samples })
            );
        }
        other => bail!("no trial {other}"),
    }
    Ok(())
}

/// All pairs of recordings, each of which is a side.
fn pairs(files: &[&str]) -> Result<()> {
    let mut sides = Vec::new();
    for file in files {
        let mut side = Aggregate::default();
        add(file, &mut side)?;
        sides.push(side);
    }
    let (mut pairs, mut alarms) = (0, 0);
    let mut rows: BTreeMap<String, u64> = BTreeMap::new();
    for (place, before) in sides.iter().enumerate() {
        for after in &sides[place + 1..] {
            let Difference { changes, .. } = diff(before, after, Options::default(), &NoDistributions);
            let significant = changes.iter().filter(|change| change.measured.significant);
            let names: Vec<_> = significant.map(|change| change.name.name.clone()).collect();
            pairs += 1;
            alarms += u64::from(!names.is_empty());
            names.into_iter().for_each(|name| *rows.entry(name).or_default() += 1);
        }
    }
    println!("{}", json!({ "trial": "pairs", "pairs": pairs, "count": alarms, "rows": rows }));
    Ok(())
}
