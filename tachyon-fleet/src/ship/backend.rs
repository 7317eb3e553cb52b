//! A backend: makes parts of segments, and pushes them one by one.

use super::config::{Config, OtlpConfig, Protocol, PyroscopeConfig, StoreConfig, StoreFormat};
use super::pyroscope::{Series, encode};
use super::spool::{Item, Spool};
use super::{grpc, otlp};
use crate::net::bucket::Bucket;
use crate::net::http::{Server, gzip};
use crate::net::push::{PushError, Reason};
use crate::net::secret::Secrets;
use crate::segment::Segment;
use crate::{place, tables};
use bytes::Bytes;
use opentelemetry_proto::tonic::collector::profiles::v1development::{
    ExportProfilesServiceRequest, ExportProfilesServiceResponse,
};
use prost::Message as _;
use reqwest::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderValue};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// The service's method.
const EXPORT: &str = "/opentelemetry.proto.collector.profiles.v1development.ProfilesService/Export";
/// Its path over HTTP.
const HTTP_PATH: &str = "v1development/profiles";
/// Pyroscope's.
const PUSH: &str = "push.v1.PusherService/Push";

/// Where segments are shipped to.
pub struct Backend {
    /// Its name.
    pub name: String,
    kind: Kind,
}

enum Kind {
    Otlp { config: OtlpConfig, server: Arc<Server> },
    Pyroscope { config: PyroscopeConfig, server: Arc<Server>, series: Mutex<Series> },
    Store { config: StoreConfig, bucket: Bucket },
}

/// What is pushed in one request.
#[derive(Debug)]
pub struct Part {
    /// Samples that are counted as shipped with it.
    pub samples: u64,
    /// Bytes that leave the host, before TLS.
    pub bytes: usize,
    /// What it is, for `--dry-run`.
    pub what: String,
    body: Body,
}

#[derive(Debug)]
enum Body {
    Otlp(ExportProfilesServiceRequest),
    Http(Bytes),
    Pyroscope { tenant: Option<String>, body: Bytes },
    Object { path: String, bytes: Bytes },
}

/// All parts of what is shipped at once.
#[derive(Debug, Default)]
pub struct Parts {
    /// In the order in which they are pushed.
    pub parts: Vec<Part>,
    /// Samples that the backend would refuse, by reason.
    pub refused: BTreeMap<Reason, u64>,
}

/// Makes the backends of a configuration, without connecting.
///
/// # Errors
/// When a secret or a certificate cannot be read.
pub fn of_config(config: &Config, secrets: &Secrets) -> anyhow::Result<Vec<Backend>> {
    use anyhow::Context as _;
    let mut names = config.names().into_iter();
    let mut backends = Vec::new();
    let mut push = |kind: anyhow::Result<Kind>| -> anyhow::Result<()> {
        let name = names.next().unwrap_or_default();
        let kind = kind.with_context(|| name.clone())?;
        backends.push(Backend { name, kind });
        Ok(())
    };
    for config in &config.otlp {
        let server = Server::new(&config.connection(), secrets, config.protocol == Protocol::Grpc);
        push(server.map(|server| Kind::Otlp { config: config.clone(), server: Arc::new(server) }))?;
    }
    for config in &config.pyroscope {
        let server = Server::new(&config.connection(), secrets, false);
        let series = Mutex::new(Series::default());
        push(server.map(|server| Kind::Pyroscope { config: config.clone(), server: Arc::new(server), series }))?;
    }
    for config in &config.store {
        let bucket = config.place().open(secrets);
        push(bucket.map(|bucket| Kind::Store { config: config.clone(), bucket }))?;
    }
    Ok(backends)
}

impl Backend {
    /// The period whose segments are shipped as one.
    #[must_use]
    pub fn batch(&self) -> Option<Duration> {
        match &self.kind {
            Kind::Store { config, .. } => config.batch,
            _ => None,
        }
    }

    /// Whether repeating a push changes nothing: then nothing is in doubt.
    #[must_use]
    pub fn is_exact(&self) -> bool {
        matches!(self.kind, Kind::Store { .. })
    }

    /// Whether it also gets files as they are.
    #[must_use]
    pub fn wants_files(&self) -> bool {
        matches!(&self.kind, Kind::Store { config, .. } if config.formats.contains(&StoreFormat::Tach))
    }

    /// Whether it only gets files: then samples are counted with them.
    #[must_use]
    pub fn counts_with_files(&self) -> bool {
        matches!(&self.kind, Kind::Store { config, .. } if !config.formats.contains(&StoreFormat::Parquet))
    }

    /// Whether all of a segment is older than the backend accepts.
    #[must_use]
    pub fn too_old(&self, segment: &Segment, now_unix: f64) -> bool {
        let Kind::Pyroscope { config, .. } = &self.kind else { return false };
        let newest_ms = segment.samples.iter().map(|row| row.slice_start_ms).max();
        newest_ms.is_some_and(|newest_ms| (newest_ms as f64) < (now_unix - config.max_age.as_secs_f64()) * 1e3)
    }

    /// Makes the parts of a segment. The same segment gives the same parts, so that an interrupted one can continue.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub fn encode(&self, segment: &Segment, now_unix: f64) -> anyhow::Result<Parts> {
        match &self.kind {
            Kind::Otlp { config, .. } => Ok(Self::otlp(segment, config)),
            Kind::Pyroscope { config, series, .. } => {
                let mut series = series.lock().unwrap_or_else(PoisonError::into_inner);
                let encoding = encode(segment, config, &mut series, now_unix);
                let parts = encoding.requests.into_iter().map(|request| {
                    let body = Bytes::from(request.push.encode_to_vec());
                    let count = request.push.series.len();
                    let of = request.tenant.as_ref().map_or_else(String::new, |tenant| format!(" of tenant {tenant}"));
                    let (bytes, samples) = (body.len(), request.samples);
                    let body = Body::Pyroscope { tenant: request.tenant, body };
                    Part { samples, bytes, what: format!("{count} series{of}"), body }
                });
                Ok(Parts { parts: parts.collect(), refused: encoding.refused })
            }
            Kind::Store { config, .. } => {
                let mut parts = Vec::new();
                if config.formats.contains(&StoreFormat::Parquet) {
                    // All samples are counted with the last object.
                    parts.extend(tables::files(segment)?.into_iter().map(|file| object(file.path, file.bytes)));
                }
                if let Some(last) = parts.last_mut() {
                    last.samples = segment.sample_count;
                }
                Ok(Parts { parts, refused: BTreeMap::new() })
            }
        }
    }

    /// The file and its account as they are, for backends that want them.
    ///
    /// # Errors
    /// When they cannot be read.
    pub fn files(&self, spool: &Spool, item: &Item, segment: &Segment) -> std::io::Result<Vec<Part>> {
        if !self.wants_files() {
            return Ok(Vec::new());
        }
        let (file, account) = spool.bytes(item)?;
        let hour = place::hour(segment.start_ms);
        let path = |ending: &str| format!("segments/{hour}/{}.{ending}", segment.name);
        let mut parts: Vec<Part> = account.map(|account| object(path("json"), account)).into_iter().collect();
        // The account first, as the agent does.
        parts.push(object(path("tach"), file));
        Ok(parts)
    }

    fn otlp(segment: &Segment, config: &OtlpConfig) -> Parts {
        let limit = usize::try_from(config.max_message).unwrap_or(usize::MAX);
        let parts = otlp::messages(segment, limit).into_iter().map(|message| {
            let processes = message.request.resource_profiles.len();
            let what = format!("profiles of {processes} processes");
            match config.protocol {
                Protocol::Grpc => {
                    let bytes = message.request.encoded_len();
                    Part { samples: message.samples, bytes, what, body: Body::Otlp(message.request) }
                }
                Protocol::Http => {
                    let body = Bytes::from(gzip(&message.request.encode_to_vec()));
                    Part { samples: message.samples, bytes: body.len(), what, body: Body::Http(body) }
                }
            }
        });
        Parts { parts: parts.collect(), refused: BTreeMap::new() }
    }

    /// Pushes a part.
    ///
    /// # Errors
    /// When it was not accepted, or that is not known.
    pub async fn push(&self, part: &Part) -> Result<(), PushError> {
        match (&self.kind, &part.body) {
            (Kind::Otlp { server, .. }, Body::Otlp(request)) => {
                let answer: ExportProfilesServiceResponse = grpc::unary(server, EXPORT, request.clone()).await?;
                taken(server, answer)
            }
            (Kind::Otlp { server, .. }, Body::Http(body)) => {
                let mut headers = HeaderMap::new();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
                headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
                let url = if server.shown().trim_end_matches('/').ends_with(HTTP_PATH) {
                    server.at("")
                } else {
                    server.at(HTTP_PATH)
                };
                let answer = server.post(url, headers, body.to_vec()).await?;
                // An unreadable answer counts as one without complaints.
                taken(server, ExportProfilesServiceResponse::decode(&answer.body[..]).unwrap_or_default())
            }
            (Kind::Pyroscope { server, .. }, Body::Pyroscope { tenant, body }) => {
                let mut headers = HeaderMap::new();
                headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/proto"));
                headers.insert("connect-protocol-version", HeaderValue::from_static("1"));
                if let Some(tenant) = tenant {
                    let value = HeaderValue::from_str(tenant);
                    let told = || PushError::new(Reason::Labels, format!("the tenant {tenant:?} is no header's value"));
                    headers.insert("x-scope-orgid", value.map_err(|_| told())?);
                }
                server.post(server.at(PUSH), headers, body.to_vec()).await.map(drop)
            }
            (Kind::Store { bucket, .. }, Body::Object { path, bytes }) => bucket.put(path, bytes.clone()).await,
            _ => Err(PushError::new(Reason::Rejected, "it is another backend's part")),
        }
    }
}

/// Checks that all profiles were accepted.
fn taken(server: &Server, answer: ExportProfilesServiceResponse) -> Result<(), PushError> {
    match answer.partial_success {
        Some(partial) if partial.rejected_profiles > 0 => {
            let said = crate::net::http::told(server.scrub(&partial.error_message).as_bytes());
            let message = format!("{} rejects {} profiles: {said}", server.shown(), partial.rejected_profiles);
            Err(PushError::new(Reason::Rejected, message))
        }
        _ => Ok(()),
    }
}

fn object(path: String, bytes: Vec<u8>) -> Part {
    Part { samples: 0, bytes: bytes.len(), what: path.clone(), body: Body::Object { path, bytes: bytes.into() } }
}
