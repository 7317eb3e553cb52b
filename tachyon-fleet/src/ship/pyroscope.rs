//! A segment for Grafana Pyroscope: `push.v1.PusherService/Push`, pprof profiles by series, within the server's limits.
//!
//! A series is `service_name`, the type of profile (`__name__`) and the labels that the configuration lists; processes that do not differ
//! in these are one. Its limits (`pkg/validation/limits.go` and `validate.go` of Pyroscope 1.x) are enforced here, so that what the
//! server would refuse is reported by reason, and not sent.

use super::config::PyroscopeConfig;
use super::pprof::{Encoded, Limits, ValueType, profiles};
use crate::net::http::gzip;
use crate::net::push::Reason;
use crate::rows::SampleRow;
use crate::segment::Segment;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use std::collections::{BTreeMap, HashMap};

/// Longest name and value of a label.
const LONGEST_NAME: usize = 1024;
const LONGEST_VALUE: usize = 2048;
/// Most bytes of profiles in a request, which has at least one profile.
const REQUEST: usize = 2 << 20;
/// How long a series counts as active.
const ACTIVE_MS: i64 = 60 * 60 * 1000;

/// `push.v1.PushRequest` (grafana/pyroscope, `api/push/v1/push.proto`); the numbers are the format.
#[derive(Clone, PartialEq, prost::Message)]
pub struct PushRequest {
    /// Series.
    #[prost(message, repeated, tag = "1")]
    pub series: Vec<RawProfileSeries>,
}

/// `push.v1.RawProfileSeries`.
#[derive(Clone, PartialEq, prost::Message)]
pub struct RawProfileSeries {
    /// Labels.
    #[prost(message, repeated, tag = "1")]
    pub labels: Vec<LabelPair>,
    /// Profiles.
    #[prost(message, repeated, tag = "2")]
    pub samples: Vec<RawSample>,
}

/// `types.v1.LabelPair` (`api/types/v1/types.proto`).
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct LabelPair {
    /// Name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Value.
    #[prost(string, tag = "2")]
    pub value: String,
}

/// `push.v1.RawSample`.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct RawSample {
    /// pprof, gzip-compressed.
    #[prost(bytes = "vec", tag = "1")]
    pub raw_profile: Vec<u8>,
    /// A UUID.
    #[prost(string, tag = "2")]
    pub id: String,
}

/// A request for a tenant.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// `X-Scope-OrgID`; none if the server has one tenant.
    pub tenant: Option<String>,
    /// Content.
    pub push: PushRequest,
    /// Samples that it stands for.
    pub samples: u64,
}

/// The result for a segment.
#[derive(Clone, Debug, Default)]
pub struct Encoding {
    /// Requests.
    pub requests: Vec<Request>,
    /// Samples that the server would refuse, by reason.
    pub refused: BTreeMap<Reason, u64>,
}

/// Series that are active at a server because of this shipper.
#[derive(Clone, Debug, Default)]
pub struct Series {
    /// By tenant and labels: when it was last sent, by the data's time.
    last_ms: HashMap<(Option<String>, Labels), i64>,
}

type Labels = Vec<(String, String)>;

impl Series {
    /// Whether one more may be sent.
    fn admits(&mut self, tenant: &Option<String>, labels: &Labels, now_ms: i64, most: usize) -> bool {
        self.last_ms.retain(|_, last_ms| now_ms.saturating_sub(*last_ms) < ACTIVE_MS);
        let key = (tenant.clone(), labels.clone());
        if !self.last_ms.contains_key(&key) {
            let active = self.last_ms.keys().filter(|(of, _)| of == tenant).count();
            if active >= most {
                return false;
            }
        }
        self.last_ms.insert(key, now_ms);
        true
    }
}

/// A type of profiles.
struct ProfileType {
    /// `__name__`.
    name: String,
    kind: Kind,
}

enum Kind {
    Cpu,
    Wall,
    Event(String),
}

/// Requests of a segment. `now_unix` decides what is too old.
#[must_use]
pub fn encode(segment: &Segment, config: &PyroscopeConfig, series: &mut Series, now_unix: f64) -> Encoding {
    let mut encoding = Encoding::default();
    // Profile types of each slice, tenant and set of labels, in order.
    let mut groups: BTreeMap<(Option<String>, Labels, i64), Vec<&SampleRow>> = BTreeMap::new();
    let oldest_ms = (now_unix - config.max_age.as_secs_f64()) * 1e3;
    for row in &segment.samples {
        let samples = row.samples.unsigned_abs();
        if (row.slice_start_ms as f64) < oldest_ms {
            *encoding.refused.entry(Reason::TooOld).or_default() += samples;
            continue;
        }
        let (tenant, labels) = labels(row, config);
        // `__name__` is one more.
        let is_long = |(name, value): &(String, String)| name.len() > LONGEST_NAME || value.len() > LONGEST_VALUE;
        if labels.len() + 1 > config.max_labels || labels.iter().any(is_long) {
            *encoding.refused.entry(Reason::Labels).or_default() += samples;
            continue;
        }
        groups.entry((tenant, labels, row.slice_start_ms)).or_default().push(row);
    }
    let limits = Limits {
        samples: config.max_samples,
        bytes: usize::try_from(config.max_profile).unwrap_or(usize::MAX),
        depth: config.max_depth.max(3),
    };
    for ((tenant, labels, slice_start_ms), rows) in groups {
        for of_type in types(segment, &rows) {
            let mut labels = labels.clone();
            labels.push(("__name__".to_owned(), of_type.name.clone()));
            labels.sort();
            let own: Vec<&SampleRow> = rows.iter().copied().filter(|row| of_type.has(segment, row)).collect();
            if !series.admits(&tenant, &labels, slice_start_ms, config.max_series) {
                let samples = own.iter().map(|row| of_type.counted(segment, row)).sum::<u64>();
                *encoding.refused.entry(Reason::SeriesLimit).or_default() += samples;
                continue;
            }
            let (encoded, refused) = of_type.encode(segment, &own, limits);
            for (reason, samples) in refused {
                *encoding.refused.entry(reason).or_default() += samples;
            }
            let samples = encoded.iter().map(|profile| profile.samples).sum();
            let raw = (0..).zip(&encoded).map(|(number, profile)| RawSample {
                raw_profile: gzip(&profile.bytes),
                id: id(segment, &labels, slice_start_ms, number),
            });
            let raw = raw.collect();
            let labels = labels.into_iter().map(|(name, value)| LabelPair { name, value }).collect();
            let one = RawProfileSeries { labels, samples: raw };
            push(&mut encoding.requests, tenant.clone(), one, samples);
        }
    }
    encoding
}

/// Puts a series into the last request, if that has the same tenant and is not too large.
fn push(requests: &mut Vec<Request>, tenant: Option<String>, series: RawProfileSeries, samples: u64) {
    let size = series.encoded_len();
    match requests.last_mut() {
        Some(last) if last.tenant == tenant && last.push.encoded_len() + size <= REQUEST => {
            last.push.series.push(series);
            last.samples += samples;
        }
        _ => requests.push(Request { tenant, push: PushRequest { series: vec![series] }, samples }),
    }
}

/// Which types of profiles rows make.
fn types(segment: &Segment, rows: &[&SampleRow]) -> Vec<ProfileType> {
    let mut types = Vec::new();
    if rows.iter().any(|row| row.on_cpu_ns > 0) {
        types.push(ProfileType { name: "process_cpu".to_owned(), kind: Kind::Cpu });
    }
    if rows.iter().any(|row| row.waiting_ns > 0) {
        types.push(ProfileType { name: "wall".to_owned(), kind: Kind::Wall });
    }
    let mut events: Vec<&str> = rows.iter().filter_map(|row| segment.event_of(row)).map(|(name, _)| name).collect();
    events.sort();
    events.dedup();
    // Names of metrics and sample types must not contain `-`.
    let plain = |name: &str| name.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    types.extend(
        events
            .into_iter()
            .map(|name| ProfileType { name: format!("event_{}", plain(name)), kind: Kind::Event(name.to_owned()) }),
    );
    types
}

/// Samples of a row that were on a CPU.
fn of_cpu(segment: &Segment, row: &SampleRow) -> i64 {
    if row.waiting_ns == 0 { row.samples } else { row.on_cpu_ns / segment.interval_ns.max(1) }
}

impl ProfileType {
    /// Samples of a row that are counted with this type: what ran is also part of wall-clock time, but is counted once.
    fn counted(&self, segment: &Segment, row: &SampleRow) -> u64 {
        let samples = match self.kind {
            Kind::Cpu => of_cpu(segment, row),
            Kind::Wall if row.on_cpu_ns > 0 => row.samples - of_cpu(segment, row),
            Kind::Wall | Kind::Event(_) => row.samples,
        };
        samples.unsigned_abs()
    }

    fn has(&self, segment: &Segment, row: &SampleRow) -> bool {
        match &self.kind {
            Kind::Cpu => row.on_cpu_ns > 0,
            Kind::Wall => row.on_cpu_ns > 0 || row.waiting_ns > 0,
            Kind::Event(name) => segment.event_of(row).is_some_and(|(own, _)| own == name),
        }
    }

    fn encode(&self, segment: &Segment, rows: &[&SampleRow], limits: Limits) -> (Vec<Encoded>, HashMap<Reason, u64>) {
        let of_cpu = |row: &SampleRow| of_cpu(segment, row);
        let counted = |row: &SampleRow| self.counted(segment, row);
        let cpu = |row: &SampleRow| row.on_cpu_ns;
        let wall = |row: &SampleRow| row.on_cpu_ns.saturating_add(row.waiting_ns);
        let events =
            |row: &SampleRow| segment.event_of(row).map_or(0, |(_, period)| row.samples.saturating_mul(period));
        match &self.kind {
            Kind::Cpu => {
                let types = [
                    ValueType { name: "samples", unit: "count", value: &of_cpu },
                    ValueType { name: "cpu", unit: "nanoseconds", value: &cpu },
                ];
                profiles(segment, rows, &types, &counted, limits)
            }
            Kind::Wall => profiles(
                segment,
                rows,
                &[ValueType { name: "wall", unit: "nanoseconds", value: &wall }],
                &counted,
                limits,
            ),
            Kind::Event(_) => {
                let name = self.name.trim_start_matches("event_");
                profiles(segment, rows, &[ValueType { name, unit: "count", value: &events }], &counted, limits)
            }
        }
    }
}

/// Tenant and labels of a row, without `__name__`.
fn labels(row: &SampleRow, config: &PyroscopeConfig) -> (Option<String>, Labels) {
    let all = row.labels.by_name(&row.host, &row.service);
    let tenant = config.tenant_label.as_ref().and_then(|label| all.get(label)).or(config.tenant.as_ref()).cloned();
    let mut labels: BTreeMap<String, String> = BTreeMap::new();
    for label in &config.labels {
        if let Some(value) = all.get(label).filter(|value| !value.is_empty()) {
            labels.insert(label_name(label), value.clone());
        }
    }
    labels.insert("service_name".to_owned(), row.service.to_string());
    (tenant, labels.into_iter().collect())
}

/// In Prometheus's form: letters, digits and `_`, not starting with a digit.
fn label_name(label: &str) -> String {
    let name = label.replace(|c: char| !c.is_ascii_alphanumeric(), "_");
    if name.starts_with(|c: char| c.is_ascii_digit()) { format!("_{name}") } else { name }
}

/// A UUID (version 8, RFC 9562) that is the same each time the same profile is sent.
fn id(segment: &Segment, labels: &Labels, slice_start_ms: i64, number: u64) -> String {
    let mut digest = Sha256::new();
    digest.update(format!("{} {slice_start_ms} {number} {labels:?}", segment.name));
    let mut bytes: [u8; 16] = digest.finalize()[..16].try_into().expect("a digest has 32 bytes");
    bytes[6] = bytes[6] & 0x0f | 0x80;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{FrameHash, stack_id};
    use crate::rows::{FrameRow, Labels as RowLabels};
    use std::io::Read as _;
    use std::sync::Arc;
    use tachyon::sinks::pprof::proto;

    const START: f64 = 1_795_374_073.0;

    fn segment(rows: &[(&str, i32, usize, i64)]) -> Segment {
        let mut segment = Segment {
            name: "h-20261122T190113Z-000000".into(),
            slice_ms: 60_000,
            interval_ns: 10_000_000,
            ..Segment::default()
        };
        for &(service, pid, depth, samples) in rows {
            let frames: Vec<FrameHash> = (0..depth)
                .map(|depth| {
                    let function = format!("f{depth}");
                    let hash = FrameHash::new("python", &function, "/srv/app.py", Some(7), None);
                    segment.frames.insert(
                        hash.frame_id(),
                        FrameRow {
                            frame_id: hash.frame_id(),
                            function: function.into(),
                            file: "/srv/app.py".into(),
                            line: Some(7),
                            kind: "python".into(),
                            build_id: None,
                        },
                    );
                    hash
                })
                .collect();
            let id = stack_id(&frames);
            segment.stacks.insert(id, frames.iter().map(FrameHash::frame_id).collect());
            let others = BTreeMap::from([("team".to_owned(), format!("of {service}"))]);
            segment.samples.push(SampleRow {
                service: service.into(),
                slice_start_ms: 1_795_374_073_000,
                stack_id: id,
                labels: Arc::new(RowLabels {
                    pid: Some(pid),
                    version: Some("1".into()),
                    others,
                    ..RowLabels::default()
                }),
                host: "h".into(),
                on_cpu_ns: samples * 10_000_000,
                waiting_ns: 0,
                samples,
            });
        }
        segment
    }

    fn decoded(raw: &RawSample) -> proto::Profile {
        let mut bytes = Vec::new();
        flate2::read::GzDecoder::new(&raw.raw_profile[..]).read_to_end(&mut bytes).unwrap();
        proto::Profile::decode(&bytes[..]).unwrap()
    }

    fn encoded(segment: &Segment, config: &PyroscopeConfig) -> Encoding {
        encode(segment, config, &mut Series::default(), START + 60.0)
    }

    #[test]
    fn processes_are_no_series() {
        let segment = segment(&[("web", 1, 2, 3), ("web", 2, 2, 4), ("web", 2, 3, 1), ("shop", 3, 1, 5)]);
        let config = PyroscopeConfig { tenant_label: Some("team".into()), ..PyroscopeConfig::default() };
        let Encoding { requests, refused } = encoded(&segment, &config);
        assert!(refused.is_empty());
        let tenants: Vec<_> = requests.iter().map(|request| request.tenant.as_deref().unwrap()).collect();
        assert_eq!(tenants, ["of shop", "of web"]);
        let series = &requests[1].push.series[0];
        let labels: Vec<(&str, &str)> = series.labels.iter().map(|it| (it.name.as_str(), it.value.as_str())).collect();
        assert_eq!(
            labels,
            [("__name__", "process_cpu"), ("host", "h"), ("service_name", "web"), ("service_version", "1")]
        );
        let profile = decoded(&series.samples[0]);
        let mut values: Vec<&[i64]> = profile.sample.iter().map(|sample| &*sample.value).collect();
        values.sort_unstable();
        assert_eq!(values, [&[1, 10_000_000][..], &[7, 70_000_000]], "both processes are one sample");
        assert_eq!(profile.time_nanos, 1_795_374_073_000_000_000);
        assert_eq!(requests, encoded(&segment, &config).requests, "ids and all");
    }

    #[test]
    fn what_the_server_would_refuse_has_a_name() {
        let segment = segment(&[("web", 1, 2, 3), ("shop", 3, 1, 5), ("idle", 4, 1, 1)]);
        let config = PyroscopeConfig::default();
        let refused = |config: &PyroscopeConfig, now| encode(&segment, config, &mut Series::default(), now).refused;
        assert_eq!(refused(&config, START + 3601.0), BTreeMap::from([(Reason::TooOld, 9)]));
        assert!(refused(&config, START + 3599.0).is_empty());
        let few = PyroscopeConfig { max_series: 2, ..config.clone() };
        assert_eq!(refused(&few, START), BTreeMap::from([(Reason::SeriesLimit, 3)]));
        let labels = PyroscopeConfig { max_labels: 3, ..config.clone() };
        assert_eq!(refused(&labels, START), BTreeMap::from([(Reason::Labels, 9)]));
        let small = PyroscopeConfig { max_profile: 100, ..config.clone() };
        assert_eq!(refused(&small, START), BTreeMap::from([(Reason::TooLarge, 9)]));
        // A series that is already active does not count again, and one that has been idle for an hour does not count.
        let mut series = Series::default();
        let of =
            |series: &mut Series, name: &str, ms| series.admits(&None, &vec![("a".to_owned(), name.to_owned())], ms, 2);
        assert!(
            of(&mut series, "x", 0) && of(&mut series, "y", 1) && of(&mut series, "x", 2) && !of(&mut series, "z", 3)
        );
        assert!(of(&mut series, "z", ACTIVE_MS + 1));
    }

    #[test]
    fn deep_stacks_keep_both_ends_and_many_stacks_are_several_profiles() {
        let rows: Vec<_> = (1..40).map(|depth| ("web", 1, depth, 1)).collect();
        let segment = segment(&rows);
        let config = PyroscopeConfig { max_depth: 10, max_samples: 16, ..PyroscopeConfig::default() };
        let Encoding { requests, refused } = encoded(&segment, &config);
        assert!(refused.is_empty());
        let profiles: Vec<_> = requests[0].push.series[0].samples.iter().map(decoded).collect();
        assert_eq!(profiles.iter().map(|profile| profile.sample.len()).collect::<Vec<_>>(), [16, 16, 7]);
        let deepest = profiles.iter().flat_map(|profile| &profile.sample).map(|sample| sample.location_id.len()).max();
        assert_eq!(deepest, Some(10));
        let told = |profile: &proto::Profile| profile.string_table.iter().any(|text| text == "<30 frames omitted>");
        assert!(profiles.iter().any(told), "of 39 frames 4 and 5 are left");
    }
}
