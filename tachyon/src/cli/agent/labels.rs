//! Labels of a process: what it is, for people who look at many hosts. They come only from the kernel and the process's
//! own environment.

use super::config::Labels;
use crate::profile::{Details, Process, script};
use serde::Deserialize;
use std::collections::BTreeMap;
use toml::Value;

/// Variables in which a process says which service it is (OpenTelemetry's, "Environment Variable Specification").
const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const RESOURCE_ATTRIBUTES: &str = "OTEL_RESOURCE_ATTRIBUTES";
/// The label of that name.
const SERVICE: &str = "service.name";

/// Changes the labels of processes that match.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Rule {
    /// Patterns by label: all of them must match. Without patterns, every process matches.
    #[serde(rename = "match")]
    matches: BTreeMap<String, String>,
    /// Only these labels stay.
    keep: Vec<String>,
    /// These labels are removed.
    drop: Vec<String>,
    /// Labels that get another name: old = new.
    rename: BTreeMap<String, String>,
    /// Labels that get a value.
    set: BTreeMap<String, String>,
    #[serde(skip)]
    patterns: Vec<(String, glob::Pattern)>,
}

impl Rule {
    /// The rules of `[[labels.rule]]`.
    ///
    /// # Errors
    /// What is wrong with the first invalid one.
    pub fn all(value: &Value) -> Result<Vec<Self>, String> {
        let mut rules: Vec<Self> =
            value.clone().try_into().map_err(|error: toml::de::Error| format!("labels.rule: {}", error.message()))?;
        for rule in &mut rules {
            for (label, pattern) in &rule.matches {
                let compiled = glob::Pattern::new(pattern)
                    .map_err(|error| format!("labels.rule: match.{label} = {pattern}: {error}"))?;
                rule.patterns.push((label.clone(), compiled));
            }
        }
        Ok(rules)
    }

    fn apply(&self, labels: &mut BTreeMap<String, String>) {
        let value = |name: &String| labels.get(name).map_or("", String::as_str);
        if !self.patterns.iter().all(|(name, pattern)| pattern.matches(value(name))) {
            return;
        }
        if !self.keep.is_empty() {
            labels.retain(|name, _| self.keep.contains(name));
        }
        labels.retain(|name, _| !self.drop.contains(name));
        for (old, new) in &self.rename {
            if let Some(value) = labels.remove(old) {
                labels.insert(new.clone(), value);
            }
        }
        labels.extend(self.set.iter().map(|(name, value)| (name.clone(), value.clone())));
    }
}

impl Labels {
    /// Variables of processes that are read.
    pub fn variables(&self) -> Vec<String> {
        let mut names = vec![SERVICE_NAME.to_owned(), RESOURCE_ATTRIBUTES.to_owned()];
        names.extend(self.environment.iter().filter(|name| !names.contains(name)).cloned().collect::<Vec<_>>());
        names
    }

    /// The labels of a process of this host. Those that would be empty are left out.
    pub fn of(&self, host: &str, process: &Process) -> BTreeMap<String, String> {
        let nothing = Details::default();
        let details = process.details.as_deref().unwrap_or(&nothing);
        let mut labels: BTreeMap<String, String> = [
            ("host", host.to_owned()),
            ("pid", process.pid.to_string()),
            ("comm", process.comm.clone()),
            ("python", process.python_version.clone()),
            ("container", process.container.clone()),
            ("pod", process.pod.clone()),
            ("cgroup", details.cgroup.clone()),
            ("uid", details.uid.map(|uid| uid.to_string()).unwrap_or_default()),
            (SERVICE, service(details).unwrap_or_else(|| process.program())),
            ("script", script(&process.cmdline)),
        ]
        .into_iter()
        .map(|(name, value)| (name.to_owned(), value))
        .collect();
        for name in &self.environment {
            labels.insert(format!("env.{name}"), details.variable(name).unwrap_or_default().to_owned());
        }
        if self.command_line {
            labels.insert("command_line".to_owned(), process.cmdline.join(" "));
        }
        labels.retain(|_, value| !value.is_empty());
        self.rules.iter().for_each(|rule| rule.apply(&mut labels));
        labels
    }
}

/// The service that the environment names.
fn service(details: &Details) -> Option<String> {
    let of_attributes = || {
        let attributes = details.variable(RESOURCE_ATTRIBUTES)?;
        let value =
            attributes.split(',').find_map(|pair| pair.trim().strip_prefix(SERVICE)?.trim_start().strip_prefix('='))?;
        // Keys and values are percent-encoded (W3C Baggage).
        Some(percent_encoding::percent_decode_str(value.trim()).decode_utf8_lossy().into_owned())
    };
    let name = details.variable(SERVICE_NAME).map(str::to_owned).filter(|name| !name.is_empty());
    name.or_else(of_attributes).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(environment: &[(&str, &str)]) -> Process {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let details =
            Details { uid: Some(33), cgroup: "/system.slice/a.service".to_owned(), environment, is_whole: true };
        Process {
            pid: 7,
            comm: "gunicorn".to_owned(),
            cmdline: ["python", "/srv/app.py", "--token=secret"].map(str::to_owned).to_vec(),
            details: Some(Box::new(details)),
            ..Process::default()
        }
    }

    #[test]
    fn a_service_is_named_by_its_environment_or_its_script() {
        for (environment, expected) in [
            (&[][..], "app.py"),
            (&[(SERVICE_NAME, "shop")][..], "shop"),
            (&[(RESOURCE_ATTRIBUTES, "a=b, service.name=my%20shop,service.namespace=x")], "my shop"),
            (&[(SERVICE_NAME, ""), (RESOURCE_ATTRIBUTES, "service.name=shop")], "shop"),
            (&[(SERVICE_NAME, "shop"), (RESOURCE_ATTRIBUTES, "service.name=other")], "shop"),
            (&[(RESOURCE_ATTRIBUTES, "service.namespace=x")], "app.py"),
        ] {
            assert_eq!(Labels::default().of("h", &process(environment))[SERVICE], expected, "{environment:?}");
        }
        let unknown = Process { comm: "python3".to_owned(), ..Process::default() };
        assert_eq!(Labels::default().of("h", &unknown)[SERVICE], "python3");
    }

    #[test]
    fn command_lines_and_variables_are_told_only_where_that_is_asked_for() {
        let process = process(&[("REGION", "eu"), (SERVICE_NAME, "shop")]);
        let labels = Labels::default().of("h", &process);
        let told: Vec<_> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(
            told,
            [
                "cgroup=/system.slice/a.service",
                "comm=gunicorn",
                "host=h",
                "pid=7",
                "script=/srv/app.py",
                "service.name=shop",
                "uid=33",
            ]
        );
        let asked = Labels { environment: vec!["REGION".to_owned()], command_line: true, rules: Vec::new() };
        assert_eq!(asked.variables(), [SERVICE_NAME, RESOURCE_ATTRIBUTES, "REGION"]);
        let labels = asked.of("h", &process);
        assert_eq!(labels["env.REGION"], "eu");
        assert_eq!(labels["command_line"], "python /srv/app.py --token=secret");
    }

    #[test]
    fn rules_work_one_after_the_other() {
        let table: toml::Table = "
            [[rule]]
            match = { comm = \"guni*\", uid = \"33\" }
            set = { \"service.name\" = \"web\", team = \"a\" }
            drop = [\"cgroup\"]
            rename = { host = \"node\" }
            [[rule]]
            match = { comm = \"celery*\" }
            set = { team = \"b\" }
            [[rule]]
            keep = [\"service.name\", \"team\", \"node\"]
        "
        .parse()
        .unwrap();
        let rules = Rule::all(&table["rule"]).unwrap();
        let labels = Labels { rules, ..Labels::default() }.of("h", &process(&[(SERVICE_NAME, "shop")]));
        let told: Vec<_> = labels.iter().map(|(name, value)| format!("{name}={value}")).collect();
        assert_eq!(told, ["node=h", "service.name=web", "team=a"]);
        let odd: toml::Table = "[[rule]]\nmatch = { comm = \"[\" }\n".parse().unwrap();
        assert!(Rule::all(&odd["rule"]).unwrap_err().contains("match.comm = ["));
    }
}
