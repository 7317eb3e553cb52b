//! Tables of backends: `[[otlp]]`, `[[pyroscope]]` and `[[store]]`, with their defaults, and the connection that each describes.
//!
//! Whether their values make sense is checked with the whole file.

use super::{optional_time, size, time};
use crate::net::bucket::Place;
use crate::net::http::Connection;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

/// The transport for OTLP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// gRPC.
    #[default]
    Grpc,
    /// HTTP with protocol buffers.
    Http,
}

/// `[[otlp]]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct OtlpConfig {
    /// What it is called in metrics and messages.
    pub name: Option<String>,
    /// Where it is.
    pub endpoint: String,
    /// How it is spoken to.
    pub protocol: Protocol,
    /// A bearer token.
    pub token_file: Option<PathBuf>,
    /// Besides.
    pub headers: BTreeMap<String, String>,
    /// Certificates of authorities.
    pub ca_file: Option<PathBuf>,
    /// Our certificate.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
    /// For one request.
    #[serde(deserialize_with = "time")]
    pub timeout: Duration,
    /// Most bytes of a message, not compressed.
    #[serde(deserialize_with = "size")]
    pub max_message: u64,
}

impl Default for OtlpConfig {
    fn default() -> Self {
        Self {
            name: None,
            endpoint: String::new(),
            protocol: Protocol::default(),
            token_file: None,
            headers: BTreeMap::new(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            timeout: Duration::from_secs(30),
            // gRPC servers accept 4 MiB by default.
            max_message: 3 << 20,
        }
    }
}

/// `[[pyroscope]]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PyroscopeConfig {
    /// What it is called in metrics and messages.
    pub name: Option<String>,
    /// Where it is.
    pub url: String,
    /// The label whose value is the tenant (`X-Scope-OrgID`).
    pub tenant_label: Option<String>,
    /// The tenant if there is no such label.
    pub tenant: Option<String>,
    /// Labels that become labels of series.
    pub labels: Vec<String>,
    /// A bearer token.
    pub token_file: Option<PathBuf>,
    /// The user for the password.
    pub user: Option<String>,
    /// Password.
    pub password_file: Option<PathBuf>,
    /// Besides.
    pub headers: BTreeMap<String, String>,
    /// Certificates of authorities.
    pub ca_file: Option<PathBuf>,
    /// Our certificate.
    pub cert_file: Option<PathBuf>,
    /// Its key.
    pub key_file: Option<PathBuf>,
    /// For one request.
    #[serde(deserialize_with = "time")]
    pub timeout: Duration,
    /// Older data is not sent.
    #[serde(deserialize_with = "time")]
    pub max_age: Duration,
    /// Most series that one hour has.
    pub max_series: usize,
    /// Most samples of a profile.
    pub max_samples: usize,
    /// Most bytes of a profile, not compressed.
    #[serde(deserialize_with = "size")]
    pub max_profile: u64,
    /// Most frames of a stack.
    pub max_depth: usize,
    /// Most labels of a series.
    pub max_labels: usize,
}

impl Default for PyroscopeConfig {
    fn default() -> Self {
        Self {
            name: None,
            url: String::new(),
            tenant_label: None,
            tenant: None,
            labels: ["host", "service.version", "python"].map(str::to_owned).into(),
            token_file: None,
            user: None,
            password_file: None,
            headers: BTreeMap::new(),
            ca_file: None,
            cert_file: None,
            key_file: None,
            timeout: Duration::from_secs(30),
            // Grafana Pyroscope 1.x, pkg/validation/limits.go: its defaults.
            max_age: Duration::from_secs(60 * 60),
            max_series: 5000,
            max_samples: 16_000,
            max_profile: 4 << 20,
            max_depth: 1000,
            max_labels: 30,
        }
    }
}

/// What a store gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StoreFormat {
    /// Tables.
    Parquet,
    /// The segment and its account, as they are.
    Tach,
}

/// `[[store]]`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct StoreConfig {
    /// What it is called in metrics and messages.
    pub name: Option<String>,
    /// `s3://bucket/prefix`, `gs://…`, `az://…`, `file:///dir`.
    pub url: String,
    /// Address of a server that is not the cloud's own.
    pub endpoint: Option<String>,
    /// Of S3.
    pub region: Option<String>,
    /// Azure's account.
    pub account: Option<String>,
    /// What it gets.
    pub formats: BTreeSet<StoreFormat>,
    /// Segments from this long a period become one file per table.
    #[serde(deserialize_with = "optional_time")]
    pub batch: Option<Duration>,
    /// Certificates of authorities.
    pub ca_file: Option<PathBuf>,
    /// S3: id of the key.
    pub access_key_id_file: Option<PathBuf>,
    /// S3: the key.
    pub secret_access_key_file: Option<PathBuf>,
    /// S3: of a session.
    pub session_token_file: Option<PathBuf>,
    /// Azure: key of the account.
    pub account_key_file: Option<PathBuf>,
    /// Azure: a shared access signature.
    pub sas_file: Option<PathBuf>,
    /// Google: a service account.
    pub service_account_file: Option<PathBuf>,
    /// For one request.
    #[serde(deserialize_with = "time")]
    pub timeout: Duration,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            name: None,
            url: String::new(),
            endpoint: None,
            region: None,
            account: None,
            formats: [StoreFormat::Parquet].into(),
            batch: None,
            ca_file: None,
            access_key_id_file: None,
            secret_access_key_file: None,
            session_token_file: None,
            account_key_file: None,
            sas_file: None,
            service_account_file: None,
            timeout: Duration::from_secs(60),
        }
    }
}

impl OtlpConfig {
    /// To its server.
    pub(crate) fn connection(&self) -> Connection {
        Connection {
            url: self.endpoint.clone(),
            ca_file: self.ca_file.clone(),
            certificate: self.cert_file.clone().zip(self.key_file.clone()),
            token_file: self.token_file.clone(),
            basic: None,
            headers: self.headers.clone(),
            timeout: self.timeout,
        }
    }
}

impl PyroscopeConfig {
    /// To its server.
    pub(crate) fn connection(&self) -> Connection {
        Connection {
            url: self.url.clone(),
            ca_file: self.ca_file.clone(),
            certificate: self.cert_file.clone().zip(self.key_file.clone()),
            token_file: self.token_file.clone(),
            basic: self.user.clone().zip(self.password_file.clone()),
            headers: self.headers.clone(),
            timeout: self.timeout,
        }
    }
}

impl StoreConfig {
    /// Where it is.
    pub(crate) fn place(&self) -> Place {
        Place {
            url: self.url.clone(),
            endpoint: self.endpoint.clone(),
            region: self.region.clone(),
            account: self.account.clone(),
            ca_file: self.ca_file.clone(),
            access_key_id_file: self.access_key_id_file.clone(),
            secret_access_key_file: self.secret_access_key_file.clone(),
            session_token_file: self.session_token_file.clone(),
            account_key_file: self.account_key_file.clone(),
            sas_file: self.sas_file.clone(),
            service_account_file: self.service_account_file.clone(),
            timeout: Some(self.timeout),
        }
    }
}
