//! What a process says about itself: the service that it belongs to (OTEP 4719, "Process Context").
//!
//! A mapping with a well-known name begins with a header, which points to a protobuf message. The process may rewrite both at any
//! time: if the header's time is 0, or differs after the message was read, it is read again, a few times.

use prost::Message;

use crate::remote::{MappedPath, Mapping, RemoteError, RemoteProcess};
use crate::types::RemoteAddr;

/// The mapping's name where `memfd_create` and `prctl` worked, where only the second did, and where only the first did; the
/// last may have ` (deleted)` after it.
const NAMES: [&[u8]; 3] = [b"[anon_shmem:OTEL_CTX]", b"[anon:OTEL_CTX]", b"/memfd:OTEL_CTX"];

/// Most mappings with such a name that are looked at. There must not be more than one.
const MAX_MAPPINGS: usize = 4;

/// How often a context that is being written is tried.
const ATTEMPTS: usize = 4;

/// Most bytes of a message; those of real programs have 400. OpenTelemetry's own profiler has the same bound.
const MAX_PAYLOAD: u32 = 1 << 16;

/// Most bytes that are kept of one value.
const MAX_TEXT: usize = 256;

/// The beginning of a header.
const SIGNATURE: [u8; 8] = *b"OTEL_CTX";

/// The version of the format.
const VERSION: u32 = 2;

/// What a process says about itself. All texts are the program's own, cut after 256 bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ProcessContext {
    /// `service.name`.
    pub service: Option<String>,
    /// `service.namespace`.
    pub namespace: Option<String>,
    /// `service.version`.
    pub version: Option<String>,
    /// `service.instance.id`.
    pub instance: Option<String>,
    /// `deployment.environment.name`.
    pub environment: Option<String>,
    /// `threadlocal.schema_version`: the layout of its threads' records.
    pub thread_schema: Option<String>,
    /// `threadlocal.attribute_key_map`: the names of a record's attributes, by their numbers.
    pub attribute_keys: Vec<String>,
    /// When it was published: nanoseconds of `CLOCK_BOOTTIME`, different for each update.
    pub published_ns: u64,
    /// Address of its header in the process.
    pub header: u64,
}

/// Why a process's context is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoProcessContext {
    /// It has no mapping with this name.
    #[error("it publishes no process context")]
    NotPublished,
    /// It was being written each time it was read.
    #[error("its process context is being written")]
    BeingWritten,
    /// The mapping does not begin as it should.
    #[error("its process context has no good header")]
    NoHeader,
    /// Another version of the format.
    #[error("its process context has version {0}, supported is {VERSION}")]
    Version(u32),
    /// It is empty, or too large to be read.
    #[error("its process context has {0} bytes")]
    Size(u32),
    /// It cannot be read.
    #[error("its process context cannot be read: {0}")]
    Unreadable(String),
    /// It is not such a message.
    #[error("its process context cannot be decoded: {0}")]
    Malformed(String),
}

/// Reads the context of a process with these mappings.
pub(super) fn read(process: &RemoteProcess, maps: &[Mapping]) -> Result<ProcessContext, NoProcessContext> {
    let mut failed = NoProcessContext::NotPublished;
    for mapping in maps.iter().filter(|mapping| is_context(mapping)).take(MAX_MAPPINGS) {
        let read = |at: u64, into: &mut [u8]| process.read_memory(RemoteAddr(at), into);
        match read_at(mapping.start, read) {
            Ok(context) => return Ok(context),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

pub(super) fn is_context(mapping: &Mapping) -> bool {
    let name = match &mapping.path {
        MappedPath::Anonymous => return false,
        MappedPath::Special(name) => name,
        MappedPath::File { path, .. } => path,
    };
    mapping.readable && !mapping.executable && NAMES.contains(&name.as_slice())
}

/// Reads the context whose header is at this address.
pub(super) fn read_at(
    at: u64,
    read: impl Fn(u64, &mut [u8]) -> Result<(), RemoteError>,
) -> Result<ProcessContext, NoProcessContext> {
    let mut failed = NoProcessContext::BeingWritten;
    for _ in 0..ATTEMPTS {
        match read_once(at, &read) {
            Ok(context) => return Ok(context),
            Err(error @ NoProcessContext::BeingWritten) => failed = error,
            Err(error) => return Err(error),
        }
    }
    Err(failed)
}

fn read_once(
    at: u64,
    read: &impl Fn(u64, &mut [u8]) -> Result<(), RemoteError>,
) -> Result<ProcessContext, NoProcessContext> {
    let unreadable = |error: RemoteError| NoProcessContext::Unreadable(error.to_string());
    let header = || {
        let mut header = [0; 32];
        read(at, &mut header).map(|()| Header::of(&header)).map_err(unreadable)
    };
    let before = header()?;
    if before.signature != SIGNATURE {
        // A writer names a mapping last, but the memory file has its name from the start: then it is still empty.
        let empty = before.signature == [0; 8];
        return Err(if empty { NoProcessContext::BeingWritten } else { NoProcessContext::NoHeader });
    }
    if before.published_ns == 0 {
        return Err(NoProcessContext::BeingWritten);
    }
    if before.version != VERSION {
        return Err(NoProcessContext::Version(before.version));
    }
    // Each read is a system call, which orders them; whether a failure is real shows only if nothing was written meanwhile.
    let message = payload(&before, read);
    if header()?.published_ns != before.published_ns {
        return Err(NoProcessContext::BeingWritten);
    }
    let context = ProcessContext::decode(&message?, before.published_ns)?;
    Ok(ProcessContext { header: at, ..context })
}

/// Whether the context whose header is at this address is still the one published then.
pub(super) fn is_current(process: &RemoteProcess, context: &ProcessContext) -> bool {
    let moment = process.read_u64(RemoteAddr(context.header.wrapping_add(16)));
    moment.is_ok_and(|moment| moment == context.published_ns)
}

fn payload(
    header: &Header,
    read: &impl Fn(u64, &mut [u8]) -> Result<(), RemoteError>,
) -> Result<Vec<u8>, NoProcessContext> {
    let size = Some(header.size).filter(|size| (1..=MAX_PAYLOAD).contains(size));
    let size = size.and_then(|size| usize::try_from(size).ok()).ok_or(NoProcessContext::Size(header.size))?;
    let mut message = vec![0; size];
    read(header.payload, &mut message).map_err(|error| NoProcessContext::Unreadable(error.to_string()))?;
    Ok(message)
}

/// The beginning of the mapping.
struct Header {
    signature: [u8; 8],
    version: u32,
    size: u32,
    published_ns: u64,
    payload: u64,
}

impl Header {
    fn of(bytes: &[u8; 32]) -> Self {
        let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Self {
            signature: bytes[..8].try_into().expect("eight bytes"),
            version: half(8),
            size: half(12),
            published_ns: word(16),
            payload: word(24),
        }
    }
}

impl ProcessContext {
    /// Decodes the message that was published at this time.
    ///
    /// # Errors
    /// When it is not such a message.
    pub fn decode(message: &[u8], published_ns: u64) -> Result<Self, NoProcessContext> {
        let context = Context::decode(message).map_err(|error| NoProcessContext::Malformed(error.to_string()))?;
        Ok(Self::of(&context, published_ns))
    }

    fn of(context: &Context, published_ns: u64) -> Self {
        let resource = context.resource.as_ref().map_or(&[][..], |resource| &resource.attributes);
        let text = |of: &[KeyValue], key: &str| {
            let value = of.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.string.as_deref()?;
            (!value.is_empty()).then(|| cut(value))
        };
        let keys = context.attributes.iter().find(|attribute| attribute.key == "threadlocal.attribute_key_map");
        let keys = keys.and_then(|keys| keys.value.as_ref()?.array.as_ref());
        let keys = keys.map_or(&[][..], |keys| &keys.values);
        Self {
            service: text(resource, "service.name"),
            namespace: text(resource, "service.namespace"),
            version: text(resource, "service.version"),
            instance: text(resource, "service.instance.id"),
            environment: text(resource, "deployment.environment.name"),
            thread_schema: text(&context.attributes, "threadlocal.schema_version"),
            // A record refers to them by one byte.
            attribute_keys: keys.iter().take(256).map(|key| cut(key.string.as_deref().unwrap_or_default())).collect(),
            published_ns,
            header: 0,
        }
    }
}

fn cut(text: &str) -> String {
    text[..text.floor_char_boundary(MAX_TEXT)].to_owned()
}

/// `opentelemetry.proto.processcontext.v1development.ProcessContext`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Context {
    #[prost(message, optional, tag = "1")]
    pub resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    pub attributes: Vec<KeyValue>,
}

/// `opentelemetry.proto.resource.v1.Resource`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Resource {
    #[prost(message, repeated, tag = "1")]
    pub attributes: Vec<KeyValue>,
}

/// `opentelemetry.proto.common.v1.KeyValue`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct KeyValue {
    #[prost(string, tag = "1")]
    pub key: String,
    #[prost(message, optional, tag = "2")]
    pub value: Option<Value>,
}

/// `opentelemetry.proto.common.v1.AnyValue`, if it is a text or a list.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Value {
    #[prost(string, optional, tag = "1")]
    pub string: Option<String>,
    #[prost(message, optional, tag = "5")]
    pub array: Option<Texts>,
}

/// `opentelemetry.proto.common.v1.ArrayValue` of texts. Nothing in it is nested.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Texts {
    #[prost(message, repeated, tag = "1")]
    pub values: Vec<Text>,
}

/// An element of a list, if it is a text.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Text {
    #[prost(string, optional, tag = "1")]
    pub string: Option<String>,
}
