//! A segment as OTLP profiles (opentelemetry-proto 1.11, `profiles/v1development`): messages with one dictionary each.
//!
//! Each process is a resource. Samples are counted, not listed: a sample has a value and no times, and each slice becomes one profile per
//! type of value, as the protocol requires since 1.8: `samples`, nanoseconds of `cpu`, nanoseconds of `off_cpu` of waiting threads, and
//! events. A message ends before it gets larger than servers accept; the next one has a dictionary of its own, which `dictionary` fills.

mod dictionary;

use crate::rows::SampleRow;
use crate::segment::Segment;
use dictionary::Dictionary;
use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::profiles::v1development as proto;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;

/// Overhead around what is counted: lengths, the scope, lengths of lengths.
const AROUND: usize = 256;

/// A message.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    /// Content.
    pub request: ExportProfilesServiceRequest,
    /// Samples in it.
    pub samples: u64,
}

/// The messages of a segment, none of which is much larger than `max_bytes` (one stack may be).
#[must_use]
pub fn messages(segment: &Segment, max_bytes: usize) -> Vec<Message> {
    // Rows of the same process and slice come together.
    let mut rows: Vec<&SampleRow> = segment.samples.iter().collect();
    rows.sort_by(|a, b| (&a.service, &a.labels, a.slice_start_ms).cmp(&(&b.service, &b.labels, b.slice_start_ms)));
    let mut messages = Vec::new();
    let mut builder = Builder::new(segment, 0);
    for row in rows {
        if builder.bytes() + builder.cost(row) > max_bytes && builder.samples > 0 {
            let number = messages.len() + 1;
            messages.push(std::mem::replace(&mut builder, Builder::new(segment, number)).finish());
        }
        builder.add(row);
    }
    if builder.samples > 0 {
        messages.push(builder.finish());
    }
    messages
}

/// The kind of a profile's values.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum ValueKind {
    Samples,
    Cpu,
    OffCpu,
    Event(String),
}

impl ValueKind {
    fn names(&self) -> (&str, &str) {
        match self {
            Self::Samples => ("samples", "count"),
            Self::Cpu => ("cpu", "nanoseconds"),
            Self::OffCpu => ("off_cpu", "nanoseconds"),
            Self::Event(name) => (name, "count"),
        }
    }
}

struct Builder<'a> {
    segment: &'a Segment,
    /// Number of the message: two messages of one segment share no profile.
    number: usize,
    dictionary: Dictionary<'a>,
    resources: Vec<proto::ResourceProfiles>,
    /// The owner of the last resource, and the profiles of its last slice.
    last: Option<(&'a SampleRow, HashMap<ValueKind, usize>)>,
    /// Size without the dictionary.
    bytes: usize,
    samples: u64,
}

impl<'a> Builder<'a> {
    fn new(segment: &'a Segment, number: usize) -> Self {
        Self {
            segment,
            number,
            dictionary: Dictionary::new(segment),
            resources: Vec::new(),
            last: None,
            bytes: AROUND,
            samples: 0,
        }
    }

    /// Its size so far, roughly.
    fn bytes(&self) -> usize {
        self.bytes + self.dictionary.bytes()
    }

    /// The most that a row adds, roughly.
    fn cost(&self, row: &SampleRow) -> usize {
        let values = 3 * 24;
        let resource = match &self.last {
            Some((last, _)) if last.labels == row.labels && last.service == row.service => 0,
            _ => 1024,
        };
        values + resource + self.dictionary.cost(row.stack_id)
    }

    fn add(&mut self, row: &'a SampleRow) {
        let is_other =
            |last: &SampleRow| last.labels != row.labels || last.service != row.service || last.host != row.host;
        if self.last.as_ref().is_none_or(|(last, _)| is_other(last)) {
            self.begin_resource(row);
        }
        if let Some((last, profiles)) = &mut self.last {
            if last.slice_start_ms != row.slice_start_ms {
                profiles.clear();
            }
            *last = row;
        }
        let stack = self.dictionary.stack(row.stack_id);
        let event = self.segment.event_of(row);
        let values =
            [(ValueKind::Samples, row.samples), (ValueKind::Cpu, row.on_cpu_ns), (ValueKind::OffCpu, row.waiting_ns)];
        let of_event =
            event.map(|(name, period)| (ValueKind::Event(name.to_owned()), row.samples.saturating_mul(period)));
        for (kind, value) in values.into_iter().chain(of_event).filter(|(_, value)| *value > 0) {
            let place = self.profile(row, kind);
            let sample = proto::Sample { stack_index: stack, values: vec![value], ..proto::Sample::default() };
            self.bytes += sample.encoded_len() + 2;
            self.profiles()[place].samples.push(sample);
        }
        self.samples += row.samples.unsigned_abs();
    }

    fn begin_resource(&mut self, row: &'a SampleRow) {
        let resource = Resource { attributes: attributes(row), ..Resource::default() };
        let scope = InstrumentationScope {
            name: "tachyon-bpf".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let scope = proto::ScopeProfiles { scope: Some(scope), ..proto::ScopeProfiles::default() };
        let resource = proto::ResourceProfiles {
            resource: Some(resource),
            scope_profiles: vec![scope],
            ..proto::ResourceProfiles::default()
        };
        self.bytes += resource.encoded_len() + 16;
        self.resources.push(resource);
        self.last = Some((row, HashMap::new()));
    }

    fn profiles(&mut self) -> &mut Vec<proto::Profile> {
        let resource = self.resources.last_mut().expect("a resource has begun");
        &mut resource.scope_profiles[0].profiles
    }

    /// The profile of this slice of the last resource.
    fn profile(&mut self, row: &SampleRow, kind: ValueKind) -> usize {
        if let Some(&place) = self.last.as_ref().and_then(|(_, profiles)| profiles.get(&kind)) {
            return place;
        }
        let (r#type, unit) = kind.names();
        let sample_type = self.dictionary.value_type(r#type, unit);
        // Everything but events comes from the clock.
        let is_event = matches!(kind, ValueKind::Event(_));
        let period_type = (!is_event).then(|| self.dictionary.value_type("cpu", "nanoseconds"));
        let (place, resources) = (self.profiles().len(), self.resources.len());
        let id = [&self.segment.name, r#type, &format!("{} {} {place} {resources}", self.number, row.slice_start_ms)]
            .join(" ");
        let nanoseconds = |ms: i64| u64::try_from(ms).unwrap_or(0).saturating_mul(1_000_000);
        let profile = proto::Profile {
            sample_type: Some(sample_type),
            time_unix_nano: nanoseconds(row.slice_start_ms),
            duration_nano: nanoseconds(self.segment.slice_ms),
            period_type,
            period: if is_event { 0 } else { self.segment.interval_ns },
            // The same each time it is sent, so that a server can recognise a duplicate.
            profile_id: Sha256::digest(id)[..16].to_vec(),
            ..proto::Profile::default()
        };
        self.bytes += profile.encoded_len() + 8;
        self.profiles().push(profile);
        if let Some((_, profiles)) = &mut self.last {
            profiles.insert(kind, place);
        }
        place
    }

    fn finish(self) -> Message {
        let request = ExportProfilesServiceRequest {
            resource_profiles: self.resources,
            dictionary: Some(self.dictionary.finish()),
        };
        Message { request, samples: self.samples }
    }
}

/// Attributes of a process, with OpenTelemetry's names where they exist.
fn attributes(row: &SampleRow) -> Vec<KeyValue> {
    let text = |key: &str, value: &str| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(Value::StringValue(value.to_owned())) }),
        ..KeyValue::default()
    };
    let labels = &row.labels;
    let mut attributes = vec![text("service.name", &row.service), text("host.name", &row.host)];
    let known = [
        ("service.version", &labels.version),
        ("process.runtime.version", &labels.python),
        ("process.script", &labels.script),
        ("process.executable.name", &labels.comm),
        ("container.id", &labels.container),
        ("k8s.pod.uid", &labels.pod),
    ];
    attributes.extend(known.into_iter().filter_map(|(key, value)| Some(text(key, value.as_deref()?))));
    attributes.push(text("process.runtime.name", "cpython"));
    if let Some(pid) = labels.pid {
        attributes.push(KeyValue {
            key: "process.pid".to_owned(),
            value: Some(AnyValue { value: Some(Value::IntValue(pid.into())) }),
            ..KeyValue::default()
        });
    }
    // A key occurs once: a rule may have set one of the names above.
    let others = labels.others.iter().filter(|(key, _)| attributes.iter().all(|known| known.key != **key));
    let others: Vec<KeyValue> = others.map(|(key, value)| text(key, value)).collect();
    attributes.extend(others);
    attributes
}

#[cfg(test)]
mod tests;
