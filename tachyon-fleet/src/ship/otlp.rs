//! A segment as OTLP profiles (opentelemetry-proto 1.11, `profiles/v1development`): messages with one dictionary each.
//!
//! Each process is a resource. Samples are counted, not listed: a sample has a value and no times, and each slice is a profile for each type of
//! value that it has, as the protocol wants it since 1.8: `samples`, nanoseconds of `cpu`, nanoseconds of `off_cpu` of waiting threads, and events.
//! A message ends before it is larger than servers take; the next one has a dictionary of its own.

use crate::hash::StackId;
use crate::rows::{FrameRow, SampleRow};
use crate::segment::Segment;
use opentelemetry_proto::tonic::collector::profiles::v1development::ExportProfilesServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::profiles::v1development as proto;
use opentelemetry_proto::tonic::resource::v1::Resource;
use prost::Message as _;
use sha2::{Digest as _, Sha256};
use std::collections::HashMap;
use tachyon::profile::address_of_name;

/// What stands for a stack without frames: stack 0 is none.
const NO_FRAMES: &str = "<no frames>";
/// Around what is counted: lengths, the scope, what lengths of lengths add.
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
    // Rows of a process and slice stand together.
    let mut rows: Vec<&SampleRow> = segment.samples.iter().collect();
    rows.sort_by(|a, b| (&a.service, &a.labels, a.slice_start_ms).cmp(&(&b.service, &b.labels, b.slice_start_ms)));
    let mut messages = Vec::new();
    let mut builder = Builder::new(segment, 0);
    for row in rows {
        if builder.bytes + builder.cost(row) > max_bytes && builder.samples > 0 {
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

/// What a profile's values are.
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
    /// Number of the message: two of one segment have no profile in common.
    number: usize,
    dictionary: proto::ProfilesDictionary,
    strings: HashMap<String, i32>,
    functions: HashMap<(i32, i32), i32>,
    /// By key and value.
    attributes: HashMap<(String, String), i32>,
    mappings: HashMap<(i32, String), i32>,
    locations: HashMap<i64, i32>,
    no_frames: Option<i32>,
    stacks: HashMap<StackId, i32>,
    resources: Vec<proto::ResourceProfiles>,
    /// Whose the last resource is, and profiles of its last slice.
    last: Option<(&'a SampleRow, HashMap<ValueKind, usize>)>,
    bytes: usize,
    samples: u64,
}

impl<'a> Builder<'a> {
    fn new(segment: &'a Segment, number: usize) -> Self {
        // The first of each table is nothing.
        let dictionary = proto::ProfilesDictionary {
            mapping_table: vec![proto::Mapping::default()],
            location_table: vec![proto::Location::default()],
            function_table: vec![proto::Function::default()],
            link_table: vec![proto::Link::default()],
            string_table: vec![String::new()],
            attribute_table: vec![proto::KeyValueAndUnit::default()],
            stack_table: vec![proto::Stack::default()],
        };
        Self {
            segment,
            number,
            dictionary,
            strings: HashMap::from([(String::new(), 0)]),
            functions: HashMap::new(),
            attributes: HashMap::new(),
            mappings: HashMap::new(),
            locations: HashMap::new(),
            no_frames: None,
            stacks: HashMap::new(),
            resources: Vec::new(),
            last: None,
            bytes: AROUND,
            samples: 0,
        }
    }

    /// What a row adds at most, roughly.
    fn cost(&self, row: &SampleRow) -> usize {
        let values = 3 * 24;
        let resource = match &self.last {
            Some((last, _)) if last.labels == row.labels && last.service == row.service => 0,
            _ => 1024,
        };
        if self.stacks.contains_key(&row.stack_id) {
            return values + resource;
        }
        let frames = self.segment.stacks.get(&row.stack_id).into_iter().flat_map(|frames| frames.iter());
        let stack: usize = frames
            .map(|id| match self.segment.frames.get(id) {
                Some(frame) if !self.locations.contains_key(id) => frame.function.len() + frame.file.len() + 64,
                _ => 5,
            })
            .sum();
        values + resource + stack + 8
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
        let stack = self.stack(row.stack_id);
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
        let sample_type = self.value_type(r#type, unit);
        // The clock is what makes all but events.
        let is_event = matches!(kind, ValueKind::Event(_));
        let period_type = (!is_event).then(|| self.value_type("cpu", "nanoseconds"));
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
            // The same each time it is sent: a server may find out that it has it.
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

    fn value_type(&mut self, r#type: &str, unit: &str) -> proto::ValueType {
        proto::ValueType { type_strindex: self.string(r#type), unit_strindex: self.string(unit) }
    }

    fn string(&mut self, text: &str) -> i32 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = index_of(&self.dictionary.string_table);
        self.bytes += text.len() + 4;
        self.dictionary.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }

    fn attribute(&mut self, key: &str, value: &str) -> i32 {
        if let Some(&index) = self.attributes.get(&(key.to_owned(), value.to_owned())) {
            return index;
        }
        let key_strindex = self.string(key);
        let index = index_of(&self.dictionary.attribute_table);
        let value_of = AnyValue { value: Some(Value::StringValue(value.to_owned())) };
        let attribute = proto::KeyValueAndUnit { key_strindex, value: Some(value_of), unit_strindex: 0 };
        self.bytes += attribute.encoded_len() + 3;
        self.dictionary.attribute_table.push(attribute);
        self.attributes.insert((key.to_owned(), value.to_owned()), index);
        index
    }

    fn stack(&mut self, id: StackId) -> i32 {
        if let Some(&index) = self.stacks.get(&id) {
            return index;
        }
        let segment = self.segment;
        let frames = segment.stacks.get(&id).into_iter().flat_map(|frames| frames.iter());
        let mut location_indices: Vec<i32> =
            frames.filter_map(|frame| segment.frames.get(frame)).map(|frame| self.location(frame)).collect();
        if location_indices.is_empty() {
            location_indices.push(self.no_frames());
        }
        let index = index_of(&self.dictionary.stack_table);
        let stack = proto::Stack { location_indices };
        self.bytes += stack.encoded_len() + 4;
        self.dictionary.stack_table.push(stack);
        self.stacks.insert(id, index);
        index
    }

    fn no_frames(&mut self) -> i32 {
        if let Some(index) = self.no_frames {
            return index;
        }
        let function_index = self.function(NO_FRAMES, "");
        let line = proto::Line { function_index, ..proto::Line::default() };
        let index = self.push_location(proto::Location { lines: vec![line], ..proto::Location::default() });
        self.no_frames = Some(index);
        index
    }

    fn location(&mut self, frame: &FrameRow) -> i32 {
        if let Some(&index) = self.locations.get(&frame.frame_id) {
            return index;
        }
        // A mapping is worth its while with a build id alone: by that a backend looks up names.
        let mapping_index = frame.build_id.as_ref().map_or(0, |build_id| self.mapping(&frame.file, build_id));
        let whole = format!("{}!{}", frame.file, frame.function);
        let address = address_of_name(&whole).filter(|_| mapping_index != 0).map_or(0, |(_, address)| address);
        let file = if mapping_index == 0 { &*frame.file } else { "" };
        let line = proto::Line {
            function_index: self.function(&frame.function, file),
            line: frame.line.map_or(0, i64::from).max(0),
            column: 0,
        };
        // opentelemetry.io/docs/specs/semconv/registry/attributes/profile: what is none of these has none.
        let kind = match &*frame.kind {
            "python" => Some("cpython"),
            "native" => Some("native"),
            "kernel" => Some("kernel"),
            _ => None,
        };
        let attribute_indices = kind.map(|kind| self.attribute("profile.frame.type", kind)).into_iter().collect();
        let index =
            self.push_location(proto::Location { mapping_index, address, lines: vec![line], attribute_indices });
        self.locations.insert(frame.frame_id, index);
        index
    }

    fn push_location(&mut self, location: proto::Location) -> i32 {
        let index = index_of(&self.dictionary.location_table);
        self.bytes += location.encoded_len() + 3;
        self.dictionary.location_table.push(location);
        index
    }

    fn function(&mut self, name: &str, file: &str) -> i32 {
        let key = (self.string(name), self.string(file));
        if let Some(&index) = self.functions.get(&key) {
            return index;
        }
        let index = index_of(&self.dictionary.function_table);
        let (name_strindex, filename_strindex) = key;
        let function = proto::Function { name_strindex, filename_strindex, ..proto::Function::default() };
        self.bytes += function.encoded_len() + 2;
        self.dictionary.function_table.push(function);
        self.functions.insert(key, index);
        index
    }

    fn mapping(&mut self, file: &str, build_id: &str) -> i32 {
        let key = (self.string(file), build_id.to_owned());
        if let Some(&index) = self.mappings.get(&key) {
            return index;
        }
        let attribute = self.attribute("process.executable.build_id.gnu", build_id);
        let index = index_of(&self.dictionary.mapping_table);
        let mapping = proto::Mapping {
            filename_strindex: key.0,
            attribute_indices: vec![attribute],
            ..proto::Mapping::default()
        };
        self.bytes += mapping.encoded_len() + 2;
        self.dictionary.mapping_table.push(mapping);
        self.mappings.insert(key, index);
        index
    }

    fn finish(self) -> Message {
        let request =
            ExportProfilesServiceRequest { resource_profiles: self.resources, dictionary: Some(self.dictionary) };
        Message { request, samples: self.samples }
    }
}

fn index_of<T>(table: &[T]) -> i32 {
    i32::try_from(table.len()).expect("a message of some megabytes has fewer than 2^31 things")
}

/// What a process is, by OpenTelemetry's names where it has some.
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
    // A key stands once: one of the names above may be a rule's.
    let others = labels.others.iter().filter(|(key, _)| attributes.iter().all(|known| known.key != **key));
    let others: Vec<KeyValue> = others.map(|(key, value)| text(key, value)).collect();
    attributes.extend(others);
    attributes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{FrameHash, stack_id};
    use crate::rows::Labels;
    use std::collections::BTreeMap;
    use std::sync::Arc;

    /// Ten processes with a hundred stacks each, some of which they share.
    fn segment() -> Segment {
        let mut segment = Segment {
            name: "h-20261122T190113Z-000000".into(),
            slice_ms: 60_000,
            interval_ns: 10_000_000,
            ..Segment::default()
        };
        for process in 0..10 {
            let labels = Arc::new(Labels { pid: Some(process), comm: Some("python3".into()), ..Labels::default() });
            for number in 0..100 {
                let of = if number < 50 { 0 } else { process };
                let frames: Vec<FrameHash> = (0..1 + number % 7)
                    .map(|depth| {
                        let (function, build_id) = (format!("f{of}.{number}.{depth}"), (depth == 3).then_some("9f"));
                        let kind = if build_id.is_some() { "native" } else { "python" };
                        let hash = FrameHash::new(kind, &function, "/srv/app.py", Some(7), build_id);
                        segment.frames.insert(
                            hash.frame_id(),
                            FrameRow {
                                frame_id: hash.frame_id(),
                                function: function.into(),
                                file: "/srv/app.py".into(),
                                line: Some(7),
                                kind: kind.into(),
                                build_id: build_id.map(Into::into),
                            },
                        );
                        hash
                    })
                    .collect();
                let id = stack_id(&frames);
                segment.stacks.insert(id, frames.iter().map(FrameHash::frame_id).collect());
                segment.samples.push(SampleRow {
                    service: "web".into(),
                    slice_start_ms: 1_795_374_073_000,
                    stack_id: id,
                    labels: Arc::clone(&labels),
                    host: "h".into(),
                    on_cpu_ns: 20_000_000,
                    waiting_ns: 10_000_000,
                    samples: 3,
                });
            }
        }
        segment
    }

    /// Names of a stack's functions.
    fn functions(dictionary: &proto::ProfilesDictionary, stack: i32) -> Vec<&str> {
        let at = |index: i32| usize::try_from(index).unwrap();
        let locations = dictionary.stack_table[at(stack)].location_indices.iter();
        locations
            .map(|&location| {
                let line = &dictionary.location_table[at(location)].lines[0];
                let function = &dictionary.function_table[at(line.function_index)];
                dictionary.string_table[at(function.name_strindex)].as_str()
            })
            .collect()
    }

    #[test]
    fn messages_are_as_small_as_servers_want_them_and_nothing_is_lost() {
        let segment = segment();
        for (limit, expected) in [(usize::MAX, 1), (40_000, 3)] {
            let messages = messages(&segment, limit);
            assert!(messages.len() >= expected, "{}", messages.len());
            assert_eq!(messages.iter().map(|message| message.samples).sum::<u64>(), 3_000);
            let mut counts: BTreeMap<(i64, Vec<String>, String), i64> = BTreeMap::new();
            let mut ids = std::collections::BTreeSet::new();
            for message in &messages {
                assert!(message.request.encoded_len() <= limit, "{}", message.request.encoded_len());
                let dictionary = message.request.dictionary.as_ref().unwrap();
                for resource in &message.request.resource_profiles {
                    let pid = resource
                        .resource
                        .as_ref()
                        .unwrap()
                        .attributes
                        .iter()
                        .find(|it| it.key == "process.pid")
                        .unwrap();
                    let Some(Value::IntValue(pid)) = pid.value.clone().unwrap().value else { panic!("a number") };
                    for profile in &resource.scope_profiles[0].profiles {
                        assert!(ids.insert(profile.profile_id.clone()), "each profile has an id of its own");
                        let name = profile.sample_type.unwrap().type_strindex;
                        let name = dictionary.string_table[usize::try_from(name).unwrap()].clone();
                        for sample in &profile.samples {
                            let stack: Vec<String> =
                                functions(dictionary, sample.stack_index).into_iter().map(str::to_owned).collect();
                            *counts.entry((pid, stack, name.clone())).or_default() += sample.values[0];
                        }
                    }
                }
            }
            assert_eq!(counts.len(), 3 * 1000);
            for ((_, _, name), value) in counts {
                assert_eq!(
                    value,
                    match name.as_str() {
                        "samples" => 3,
                        "cpu" => 20_000_000,
                        "off_cpu" => 10_000_000,
                        _ => 0,
                    }
                );
            }
        }
    }

    #[test]
    fn dictionaries_begin_with_nothing_and_have_nothing_twice() {
        let messages = messages(&segment(), usize::MAX);
        let dictionary = messages[0].request.dictionary.as_ref().unwrap();
        assert_eq!(dictionary.stack_table[0], proto::Stack::default());
        assert_eq!(dictionary.location_table[0], proto::Location::default());
        assert_eq!(dictionary.string_table[0], "");
        let once = |texts: Vec<String>| texts.iter().collect::<std::collections::BTreeSet<_>>().len() == texts.len();
        assert!(once(dictionary.string_table.clone()));
        assert!(once(dictionary.stack_table.iter().map(|it| format!("{it:?}")).collect()));
        assert!(once(dictionary.location_table.iter().map(|it| format!("{it:?}")).collect()));
        assert!(once(dictionary.function_table.iter().map(|it| format!("{it:?}")).collect()));
        // Only what has a build id has a mapping.
        assert_eq!(dictionary.mapping_table.len(), 2);
        let mapping = &dictionary.mapping_table[1];
        let attribute = &dictionary.attribute_table[usize::try_from(mapping.attribute_indices[0]).unwrap()];
        assert_eq!(
            dictionary.string_table[usize::try_from(attribute.key_strindex).unwrap()],
            "process.executable.build_id.gnu"
        );
    }

    #[test]
    fn the_same_segment_gives_the_same_messages() {
        let (segment, other) = (segment(), segment());
        assert_eq!(messages(&segment, 40_000), messages(&other, 40_000));
    }
}
