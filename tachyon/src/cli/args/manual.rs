//! What is generated from the command line's definition: the manual page and the shells' completions.

use super::{CommandLine, EXAMPLES};
use clap::CommandFactory as _;

const EXIT_STATUS: [(&str, &str); 5] = [
    ("0", "The profile was written."),
    ("1", "It was not, or `doctor` found that this machine cannot profile."),
    ("2", "Usage error."),
    ("3", "`diff`: a significant increase exceeds --fail-over."),
    ("any", "Exit status of the command, with `-- CMD`."),
];

const FILES: [(&str, &str); 4] = [
    (
        "tachyon-DATE-TIME.tach",
        "The profile of a recording without --output, in the current directory; the time is UTC.",
    ),
    (
        "PATH.part, PATH.part.journal, PATH.part.tail",
        "A recording in progress, or one that was killed: `recover` reads them.",
    ),
    ("~/.cache/debuginfod_client", "Debug files that `symbolize` finds functions in."),
    ("/usr/lib/debug", "Likewise."),
];

/// The manual page: the page of the program, then those of its verbs as sections.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_man(out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let mut command = CommandLine::command();
    command.build();
    let man =
        clap_mangen::Man::new(command.clone()).date("").source(concat!("tachyon-bpf ", env!("CARGO_PKG_VERSION")));
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    for verb in command.get_subcommands() {
        // The options above are already those of `record`.
        if verb.get_name() != "record" {
            let verb_man = clap_mangen::Man::new(verb.clone());
            writeln!(out, ".SH {}", verb.get_name().to_uppercase())?;
            writeln!(out, "{}", verb.get_about().map(ToString::to_string).unwrap_or_default())?;
            let mut options = Vec::new();
            verb_man.render_options_section(&mut options)?;
            out.write_all(String::from_utf8_lossy(&options).replace(".SH OPTIONS", ".SS Options").as_bytes())?;
        }
    }
    write_man_sections(out)?;
    out.flush()
}

/// The sections of the manual page that do not come from options.
fn write_man_sections(out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let roff = |text: &str| text.replace('\\', "\\e").replace('-', "\\-");
    let entries = |out: &mut dyn std::io::Write, title: &str, entries: &[(&str, &str)]| {
        writeln!(out, ".SH {title}")?;
        entries.iter().try_for_each(|(term, text)| writeln!(out, ".TP\n\\fB{}\\fR\n{}", roff(term), roff(text)))
    };
    writeln!(out, ".SH EXAMPLES")?;
    for line in EXAMPLES.lines().skip(1).take_while(|line| !line.is_empty()) {
        let (command, text) = line.trim().split_once("  ").unwrap_or((line.trim(), ""));
        writeln!(out, ".TP\n\\fB{}\\fR\n{}", roff(command), roff(text.trim()))?;
    }
    entries(out, "EXIT STATUS", &EXIT_STATUS)?;
    entries(out, "FILES", &FILES)?;
    writeln!(out, ".SH SEE ALSO")?;
    writeln!(out, ".BR py\\-spy (1),\n.BR perf (1),\n.BR bpf (2),\n.BR perf_event_open (2),\n.BR capabilities (7)")
}

/// The completions of a shell.
///
/// # Errors
/// When `out` cannot be written.
pub fn write_completions(shell: clap_complete::Shell, out: &mut dyn std::io::Write) -> std::io::Result<()> {
    let command = CommandLine::command();
    // zsh's function would take a verb for CMD, which needs its `--`, and offer none of the verb's options.
    let options = command.get_arguments().filter(|argument| !argument.is_positional()).cloned();
    let mut command = clap::Command::new("tachyon-bpf").args(options).subcommands(command.get_subcommands().cloned());
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut command, "tachyon-bpf", &mut text);
    // clap_complete 4.6 sets one name for each verb in bash, but looks for another if the program's name has a hyphen.
    let text = String::from_utf8_lossy(&text).replace("tachyon__subcmd__bpf", "tachyon__bpf");
    out.write_all(text.as_bytes())
}
