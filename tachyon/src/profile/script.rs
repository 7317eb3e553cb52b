//! What a Python was told to run, judged by its command line alone.
//!
//! A program may overwrite its command line; if it no longer looks like one, there is no script.

/// Options that take the next word as their value, unless it is in the same word (`CPython 3.15, Python/getopt.c`; the
/// same since 3.8).
const WITH_VALUE: [char; 2] = ['W', 'X'];

/// The script or module of a command line: `app.py`, `-m gunicorn`; `-c` for a program in the command line, `-` for one
/// from standard input. Empty when there is none, or when this is not the command line of a `python`.
#[must_use]
pub fn script(cmdline: &[String]) -> String {
    let mut words = cmdline.iter().map(String::as_str);
    let program = words.next().unwrap_or_default();
    if !program.rsplit('/').next().unwrap_or_default().trim_start_matches('-').starts_with("python") {
        return String::new();
    }
    while let Some(word) = words.next() {
        let Some(options) = word.strip_prefix('-') else { return word.to_owned() };
        match options {
            "" => return "-".to_owned(),
            "-" => return words.next().unwrap_or_default().to_owned(),
            "-check-hash-based-pycs" => drop(words.next()),
            _ if options.starts_with('-') => {}
            _ => {
                if let Some(script) = short(options, &mut words) {
                    return script;
                }
            }
        }
    }
    String::new()
}

/// A command line without the program's arguments: its name, and its script or module.
#[must_use]
pub fn without_arguments(cmdline: &[String]) -> Vec<String> {
    // A program may write its title over its command line, as one word with spaces.
    let program = cmdline.first().and_then(|word| word.split_whitespace().next()).map(str::to_owned);
    let script = script(cmdline);
    let words: Vec<&str> = match script.strip_prefix("-m ") {
        Some(module) => vec!["-m", module],
        None if script.is_empty() => Vec::new(),
        None => vec![&script],
    };
    program.into_iter().chain(words.into_iter().map(str::to_owned)).collect()
}

/// A word of one-letter options: `-m` and `-c` come last, and their value may follow in the same word.
fn short<'a>(options: &'a str, words: &mut impl Iterator<Item = &'a str>) -> Option<String> {
    for (at, option) in options.char_indices() {
        let joined = &options[at + option.len_utf8()..];
        let mut value = || if joined.is_empty() { words.next().unwrap_or_default() } else { joined };
        match option {
            'c' => return Some("-c".to_owned()),
            'm' => {
                let module = value();
                return Some(if module.is_empty() { String::new() } else { format!("-m {module}") });
            }
            _ if WITH_VALUE.contains(&option) => {
                value();
                return None;
            }
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_left_out_and_the_script_stays() {
        for (line, expected) in [
            ("python3 -W ignore /srv/app.py --token secret", "python3|/srv/app.py"),
            ("python3 -m gunicorn --env=KEY=secret", "python3|-m|gunicorn"),
            ("python3 -c key='secret'", "python3|-c"),
            ("/opt/app --secret", "/opt/app"),
            ("", ""),
        ] {
            let words: Vec<String> = line.split(' ').filter(|word| !word.is_empty()).map(str::to_owned).collect();
            let left = without_arguments(&words);
            assert_eq!(left.join("|"), expected);
            assert_eq!(script(&left), script(&words), "{line}");
        }
        assert_eq!(without_arguments(&["celery: worker --token=secret".to_owned()]), ["celery:"]);
    }

    #[test]
    fn scripts_and_modules() {
        for (line, expected) in [
            ("python app.py", "app.py"),
            ("/usr/bin/python3.12 -u /srv/app.py -m x", "/srv/app.py"),
            ("/venv/bin/python /venv/bin/gunicorn app:app", "/venv/bin/gunicorn"),
            ("python3 -m gunicorn -w 4 app:app", "-m gunicorn"),
            ("python3 -mhttp.server", "-m http.server"),
            ("python3 -Im pip list", "-m pip"),
            ("python3 -m", ""),
            ("python3 -c print(1) app.py", "-c"),
            ("python3 -Ic pass", "-c"),
            ("python3 -cpass", "-c"),
            ("python3 -W ignore app.py", "app.py"),
            ("python3 -Wignore -Xdev -X importtime app.py", "app.py"),
            ("python3 -uW error app.py", "app.py"),
            ("python3 -OOBs -i app.py", "app.py"),
            ("python3 --check-hash-based-pycs always app.py", "app.py"),
            ("python3 --help-env app.py", "app.py"),
            ("python3 -- app.py", "app.py"),
            ("python3 -é app.py", "app.py"),
            ("python3 - x", "-"),
            ("-python3 app.py", "app.py"),
            ("python3", ""),
            ("python3 -X", ""),
            ("python3 --", ""),
            ("uwsgi --ini app.ini", ""),
            ("gunicorn: master [app]", ""),
            ("", ""),
        ] {
            let words: Vec<String> = line.split(' ').map(str::to_owned).collect();
            assert_eq!(script(&words), expected, "{line:?}");
        }
        assert_eq!(script(&[]), "");
    }
}
