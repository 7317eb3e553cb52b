//! What the profiler must refuse in a guest, with a remedy: too little locked memory, Debian's `perf_event_paranoid`, a kernel
//! in lockdown; and that it works with exactly the capabilities that are needed.

use anyhow::{Result, ensure};

/// Judges what the guest's `refuses` left, file by file through `read`. `memlock` says whether this kernel counts maps as
/// locked memory, and is `None` if the guest could not try it.
///
/// # Errors
/// It was not refused, or the message names no remedy.
pub(super) fn judge(read: &impl Fn(&str) -> Result<String>, memlock: Option<bool>) -> Result<()> {
    if let Some(counted) = memlock {
        if counted {
            refused(read, "memlock", "warn  RLIMIT_MEMLOCK: 65536 bytes", "`ulimit -l unlimited` first")?;
        }
        refused(read, "paranoid", "warn  perf_event_paranoid: 3", "`sysctl kernel.perf_event_paranoid=2`")?;
        recorded(read, "capable")?;
    }
    refused(read, "lockdown", "FAIL  lockdown: ", "boot with lockdown=integrity or without lockdown")
}

fn recorded(read: &impl Fn(&str) -> Result<String>, what: &str) -> Result<()> {
    let (status, said) = (read(&format!("{what}/record.status"))?, read(&format!("{what}/record.log"))?);
    ensure!(status.trim() == "0", "{what}: status {}: {said}", status.trim());
    Ok(())
}

fn refused(read: &impl Fn(&str) -> Result<String>, what: &str, line: &str, mend: &str) -> Result<()> {
    let (status, said) = (read(&format!("{what}/record.status"))?, read(&format!("{what}/record.log"))?);
    ensure!(status.trim() == "1" && said.contains(mend), "{what}: status {}, no `{mend}` in: {said}", status.trim());
    let said = read(&format!("{what}/doctor"))?;
    let told = said.lines().any(|told| told.starts_with(line) && told.contains(mend));
    ensure!(told, "{what}: no line `{line}...{mend}` of the doctor: {said}");
    Ok(())
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A guest's files if all is as it must be.
    pub(in super::super) const SENT: [(&str, &str); 11] = [
        ("memlock/record.status", "1\n"),
        (
            "memlock/record.log",
            "tachyon-bpf: cannot load\nhint: `ulimit -l unlimited` first, or add CAP_SYS_RESOURCE\n",
        ),
        ("memlock/doctor", "warn  RLIMIT_MEMLOCK: 65536 bytes, counted; `ulimit -l unlimited` first\n"),
        ("paranoid/record.status", "1\n"),
        ("paranoid/record.log", "hint: be root, or `sysctl kernel.perf_event_paranoid=2` with CAP_PERFMON\n"),
        ("paranoid/doctor", "warn  perf_event_paranoid: 3; be root, or `sysctl kernel.perf_event_paranoid=2`\n"),
        ("capable/record.status", "0\n"),
        ("capable/record.log", "100 samples\n"),
        ("lockdown/record.status", "1\n"),
        ("lockdown/record.log", "hint: boot with lockdown=integrity or without lockdown\n"),
        ("lockdown/doctor", "FAIL  lockdown: kernel lockdown; boot with lockdown=integrity or without lockdown\n"),
    ];

    #[test]
    fn what_is_not_refused_is_found() {
        let with = |changed: &'static str, text: &'static str| {
            move |name: &str| -> Result<String> {
                let sent = SENT.iter().find(|(known, _)| *known == name).map_or("", |(_, text)| text);
                Ok(if name == changed { text } else { sent }.to_owned())
            }
        };
        judge(&with("", ""), Some(true)).unwrap();
        for (changed, text) in [
            ("memlock/record.status", "0"),
            ("paranoid/doctor", "ok    perf_event_paranoid: 3\n"),
            ("capable/record.status", "1"),
            ("lockdown/record.log", "no"),
            ("lockdown/doctor", "ok"),
        ] {
            assert!(judge(&with(changed, text), Some(true)).is_err(), "{changed}");
        }
        assert!(judge(&with("capable/record.status", "1"), Some(false)).is_err(), "it was refused");
        judge(&with("memlock/record.status", "0"), Some(false)).unwrap();
    }
}
