//! What `tests/kernel/kick.c` saw on a kernel: whether a thread's stack can be read between its wait and its own code.

use std::collections::HashMap;
use std::fmt::Write as _;

use anyhow::{Context, Result, ensure};

/// Fewest kicks that must have been tried: an emulated CPU makes some hundreds a second.
const FEWEST: u64 = 500;

/// Every kick must have arrived in the thread that it was meant for, before that ran any code of its own.
///
/// # Errors
/// The kernel refused, or a kick did not.
pub(crate) fn judge(told: &str, summary: &mut String) -> Result<()> {
    if let Some(refused) = told.lines().find(|line| line.starts_with("refused ")) {
        anyhow::bail!("no kick: {refused}");
    }
    let lines = told.lines().filter_map(|line| line.split_once(' '));
    let told: HashMap<&str, &str> = lines.collect();
    let hook = told.get("hook").context("the kick's program named no hook")?;
    let number = |name: &str| -> Result<u64> {
        let number = told.get(name).with_context(|| format!("the kick's program told no {name}"))?;
        number.parse().with_context(|| format!("{name} is {number:?}"))
    };
    let (kicked, in_thread) = (number("kicked")?, number("in_thread")?);
    for never in ["elsewhere", "unreadable", "too_late", "not_met"] {
        let count = number(never)?;
        ensure!(count == 0, "{count} of {kicked} kicks at {hook}: {never}");
    }
    ensure!(in_thread == kicked, "{kicked} kicks, {in_thread} of them met at {hook}");
    ensure!(kicked >= FEWEST, "{kicked} kicks, at least {FEWEST} wanted");
    let mean_us = number("latency_sum_ns")? / in_thread / 1_000;
    let max_us = number("latency_max_ns")? / 1_000;
    write!(
        summary,
        "; {in_thread} of {kicked} kicks met by {hook} before the thread's own code, after {mean_us} us (at most {max_us})"
    )
    .context("cannot sum up")
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(crate) const SENT: &str = "hook irq_work_entry\nswitched_in 2004\nkicked 2003\nin_thread 2003\nelsewhere 0\n\
        unreadable 0\ntoo_late 0\nnot_met 0\nring_full 1\nlatency_sum_ns 20030000\nlatency_max_ns 48252\n";

    #[test]
    fn each_kick_must_be_met_in_time() {
        let mut summary = String::new();
        judge(SENT, &mut summary).unwrap();
        assert!(summary.contains("2003 of 2003 kicks met by irq_work_entry"), "{summary}");
        assert!(summary.ends_with("after 10 us (at most 48)"), "{summary}");
        for (good, bad) in [
            ("too_late 0", "too_late 1"),
            ("in_thread 2003", "in_thread 2002"),
            ("elsewhere 0\n", ""),
            ("hook irq_work_entry", "refused irq_work_entry: No such file or directory"),
        ] {
            assert!(judge(&SENT.replace(good, bad), &mut summary).is_err(), "{bad}");
        }
        let few = "hook ipi_entry\nkicked 9\nin_thread 9\nelsewhere 0\nunreadable 0\ntoo_late 0\nnot_met 0\n";
        assert!(judge(few, &mut summary).unwrap_err().to_string().contains("at least 500"));
    }
}
