//! Object stores and directories by their URL: `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, `file:///dir`, or a path.

use super::http::{choose_encryption, shown, told};
use super::push::{PushError, Reason};
use super::secret::Secrets;
use anyhow::{Context as _, bail};
use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::client::ClientOptions;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{Certificate, ObjectMeta, ObjectStore, ObjectStoreExt as _, RetryConfig};
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tachyon::advice::Refusal;
use url::Url;

/// How to get to a store. What is not given comes from the cloud's own variables (`AWS_…`, `AZURE_…`, `GOOGLE_…`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place {
    /// `s3://bucket/prefix`, `gs://…`, `az://container/prefix`, `file:///dir`, or a path.
    pub url: String,
    /// Address of a server that is not the cloud's own.
    pub endpoint: Option<String>,
    /// Region of S3.
    pub region: Option<String>,
    /// Azure's account.
    pub account: Option<String>,
    /// Certificates of authorities, besides the system's.
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
    /// Google: a service account, as JSON.
    pub service_account_file: Option<PathBuf>,
    /// For one request.
    pub timeout: Option<Duration>,
}

/// A place for objects.
#[derive(Clone, Debug)]
pub struct Bucket {
    store: Store,
    prefix: Key,
    shown: String,
    secrets: Secrets,
}

#[derive(Clone, Debug)]
enum Store {
    Remote(Arc<dyn ObjectStore>),
    /// Created when something is written; reading does not create it.
    Directory(PathBuf),
}

/// Whether something is a URL, not a path.
#[must_use]
pub fn is_url(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '+'))
}

/// As a URL: a path is a directory of this host.
///
/// # Errors
/// When it is neither.
pub(crate) fn url(text: &str) -> anyhow::Result<Url> {
    if is_url(text) {
        return text.parse().with_context(|| format!("{} is no URL", shown(text)));
    }
    let path = std::path::absolute(Path::new(text)).with_context(|| format!("{text} is no path"))?;
    Url::from_directory_path(&path).ok().with_context(|| format!("{} is no path", path.display()))
}

impl Place {
    /// A place without credentials, for reading.
    #[must_use]
    pub fn of(url: &str) -> Self {
        Self {
            url: url.to_owned(),
            endpoint: std::env::var("AWS_ENDPOINT_URL").ok().filter(|_| url.starts_with("s3")),
            ..Self::default()
        }
    }

    fn client(&self, secrets: &Secrets, allow_http: bool) -> anyhow::Result<ClientOptions> {
        let mut options = ClientOptions::new()
            .with_allow_http(allow_http)
            .with_timeout(self.timeout.unwrap_or(Duration::from_secs(60)))
            .with_connect_timeout(Duration::from_secs(10));
        if let Some(file) = &self.ca_file {
            let text = secrets.bytes(file)?;
            let authorities = Certificate::from_pem_bundle(&text);
            for authority in authorities.with_context(|| format!("{} has no certificate", file.display()))? {
                options = options.with_root_certificate(authority);
            }
        }
        Ok(options)
    }

    /// Opens it without connecting to anything.
    ///
    /// # Errors
    /// When the kind of URL is unknown, a secret cannot be read, or something is missing.
    pub fn open(&self, secrets: &Secrets) -> anyhow::Result<Bucket> {
        choose_encryption();
        let url = url(&self.url)?;
        let shown = self.url.clone();
        if url.password().is_some() {
            let hint = "give the key as a file: secret_access_key_file, account_key_file, service_account_file";
            return Err(Refusal::new("the URL of a store has a password in it").with_hint(hint).into());
        }
        let read = |file: &Option<PathBuf>| file.as_ref().map(|file| secrets.read(file)).transpose();
        let endpoint = self.endpoint.as_ref();
        let in_the_clear = endpoint.is_some_and(|endpoint| endpoint.starts_with("http://"));
        let client = self.client(secrets, in_the_clear)?;
        // Retrying is left to the spool.
        let retry = RetryConfig { max_retries: 1, retry_timeout: Duration::from_secs(30), ..RetryConfig::default() };
        let prefix = url.path().trim_matches('/').to_owned();
        let store: Arc<dyn ObjectStore> = match url.scheme() {
            "file" => {
                let path = url.to_file_path().ok().with_context(|| format!("{url} is no directory of this host"))?;
                let store = Store::Directory(path);
                return Ok(Bucket { store, prefix: Key::default(), shown, secrets: secrets.clone() });
            }
            "s3" | "s3a" => {
                let mut s3 = AmazonS3Builder::from_env().with_bucket_name(host(&url)?);
                s3 = s3.with_client_options(client).with_retry(retry);
                let texts = [
                    (AmazonS3ConfigKey::Endpoint, endpoint.cloned()),
                    (AmazonS3ConfigKey::Region, self.region.clone()),
                    (AmazonS3ConfigKey::AccessKeyId, read(&self.access_key_id_file)?.map(|it| it.expose().to_owned())),
                    (
                        AmazonS3ConfigKey::SecretAccessKey,
                        read(&self.secret_access_key_file)?.map(|it| it.expose().to_owned()),
                    ),
                    (AmazonS3ConfigKey::Token, read(&self.session_token_file)?.map(|it| it.expose().to_owned())),
                ];
                for (key, text) in texts {
                    if let Some(text) = text {
                        s3 = s3.with_config(key, text);
                    }
                }
                Arc::new(s3.build().with_context(|| format!("cannot open {shown}"))?)
            }
            "az" | "azure" | "abfs" | "abfss" => {
                let mut azure = MicrosoftAzureBuilder::from_env().with_container_name(container(&url)?);
                azure = azure.with_client_options(client).with_retry(retry);
                let texts = [
                    (AzureConfigKey::Endpoint, endpoint.cloned()),
                    (AzureConfigKey::AccountName, self.account.clone()),
                    (AzureConfigKey::AccessKey, read(&self.account_key_file)?.map(|it| it.expose().to_owned())),
                    (AzureConfigKey::SasKey, read(&self.sas_file)?.map(|it| it.expose().to_owned())),
                ];
                for (key, text) in texts {
                    if let Some(text) = text {
                        azure = azure.with_config(key, text);
                    }
                }
                Arc::new(azure.build().with_context(|| format!("cannot open {shown}"))?)
            }
            "gs" | "gcs" => {
                let mut google = GoogleCloudStorageBuilder::from_env().with_bucket_name(host(&url)?);
                google = google.with_client_options(client).with_retry(retry);
                if let Some(endpoint) = endpoint {
                    google = google.with_base_url(endpoint);
                }
                if let Some(file) = &self.service_account_file {
                    google = google.with_service_account_path(secrets.place(file).to_string_lossy());
                }
                Arc::new(google.build().with_context(|| format!("cannot open {shown}"))?)
            }
            scheme => {
                let hint =
                    "known are s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX and file:///DIRECTORY";
                bail!(Refusal::new(format!("no store is known by {scheme}://")).with_hint(hint));
            }
        };
        let prefix = Key::parse(&prefix).with_context(|| format!("{shown} has no usable prefix"))?;
        Ok(Bucket { store: Store::Remote(store), prefix, shown, secrets: secrets.clone() })
    }
}

fn host(url: &Url) -> anyhow::Result<&str> {
    url.host_str().with_context(|| format!("{url} names no bucket"))
}

/// `az://container/prefix`, or `abfss://container@account.dfs.core.windows.net/prefix`.
fn container(url: &Url) -> anyhow::Result<&str> {
    if url.username().is_empty() { host(url) } else { Ok(url.username()) }
}

impl Bucket {
    /// Where it is, for people.
    #[must_use]
    pub fn shown(&self) -> &str {
        &self.shown
    }

    fn key(&self, path: &str) -> Result<Key, PushError> {
        let prefix = self.prefix.as_ref();
        let path = if prefix.is_empty() { path.to_owned() } else { format!("{prefix}/{path}") };
        Key::parse(&path).map_err(|error| PushError::new(Reason::Rejected, format!("{path} is no key: {error}")))
    }

    fn store(&self) -> Result<Arc<dyn ObjectStore>, PushError> {
        match &self.store {
            Store::Remote(store) => Ok(Arc::clone(store)),
            Store::Directory(path) => {
                std::fs::metadata(path).map_err(|error| of_file(path, &error))?;
                let store = LocalFileSystem::new_with_prefix(path).map_err(|error| self.failure(error))?;
                Ok(Arc::new(store))
            }
        }
    }

    /// Writes an object, or replaces it with the same content.
    ///
    /// # Errors
    /// When it is not known to be there afterwards.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), PushError> {
        let key = self.key(path)?;
        if let Store::Directory(directory) = &self.store {
            let path = directory.join(path);
            let written =
                tokio::task::spawn_blocking(move || write(&path, &bytes).map_err(|error| of_file(&path, &error)));
            return written.await.map_err(|error| PushError::new(Reason::ServerError, error.to_string()))?;
        }
        self.store()?.put(&key, bytes.into()).await.map(drop).map_err(|error| self.failure(error))
    }

    /// An object's content.
    ///
    /// # Errors
    /// When it cannot be read.
    pub async fn get(&self, path: &str) -> Result<Bytes, PushError> {
        let key = self.key(path)?;
        let store = self.store()?;
        let content = async { store.get(&key).await?.bytes().await };
        content.await.map_err(|error| self.failure(error))
    }

    /// Paths (below the prefix) and sizes of all objects below a directory, in order.
    ///
    /// # Errors
    /// When they cannot be listed.
    pub async fn list(&self, directory: &str) -> Result<Vec<(String, u64)>, PushError> {
        let key = self.key(directory)?;
        let store = self.store()?;
        let found: Vec<ObjectMeta> = store.list(Some(&key)).try_collect().await.map_err(|error| self.failure(error))?;
        let skipped = if self.prefix.as_ref().is_empty() { 0 } else { self.prefix.as_ref().len() + 1 };
        let mut found: Vec<(String, u64)> =
            found.into_iter().map(|meta| (meta.location.as_ref()[skipped..].to_owned(), meta.size)).collect();
        found.sort();
        Ok(found)
    }

    fn failure(&self, error: object_store::Error) -> PushError {
        use object_store::Error;
        let reason = match &error {
            Error::Unauthenticated { .. } | Error::PermissionDenied { .. } => Reason::Unauthorized,
            Error::NotFound { .. } => Reason::NotFound,
            Error::InvalidPath { .. } | Error::NotSupported { .. } | Error::NotImplemented { .. } => Reason::Rejected,
            _ => of_causes(&error),
        };
        // Before it is cut: half a secret is still a secret.
        let message = format!("{}: {}", self.shown, told(self.secrets.scrub(&chain(&error)).as_bytes()));
        let error = PushError::new(reason, message);
        match reason {
            Reason::Unauthorized => error.with_hint("the keys are missing, wrong, or may not write there"),
            Reason::NotFound => error.with_hint("the bucket must be there: it is not made from here"),
            Reason::Tls => error.with_hint("give ca_file if an authority of your own signs its certificate"),
            _ => error,
        }
    }
}

/// Writes a file that appears only when complete, even after a power cut. What a killed writer left behind is replaced by the next one; the
/// library's writer uses a new name each time.
fn write(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let directory = path.parent().unwrap_or(path);
    std::fs::create_dir_all(directory)?;
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part = directory.join(format!(".{name}.part"));
    let mut file = File::create(&part)?;
    file.write_all(bytes)?;
    file.sync_data()?;
    std::fs::rename(part, path)
}

fn of_file(path: &Path, error: &std::io::Error) -> PushError {
    use std::io::ErrorKind;
    let reason = match error.kind() {
        ErrorKind::NotFound => Reason::NotFound,
        ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem => Reason::Unauthorized,
        _ => Reason::ServerError,
    };
    let message = format!("{}: {}", path.display(), error.to_string().to_lowercase());
    PushError::new(reason, message).with_hint("whoever runs this must be able to use that directory")
}

fn chain(error: &object_store::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

/// The reason for a client's error: the client keeps the causes, not their kinds.
fn of_causes(error: &object_store::Error) -> Reason {
    let text = chain(error);
    let has = |words: &[&str]| words.iter().any(|word| text.contains(word));
    if has(&["certificate", "tls handshake", "TLS"]) {
        Reason::Tls
    } else if has(&["proxy", "tunnel"]) {
        Reason::Proxy
    } else if has(&[
        "InvalidAccessKeyId",
        "SignatureDoesNotMatch",
        "403 Forbidden",
        "AuthorizationFailure",
        "401 Unauthorized",
    ]) {
        Reason::Unauthorized
    } else if has(&["NoSuchBucket", "ContainerNotFound"]) {
        Reason::NotFound
    } else if has(&["timed out", "timeout"]) {
        Reason::Timeout
    } else if has(&["dns error", "onnection refused", "tcp connect", "HTTP connect"]) {
        Reason::Unreachable
    } else if has(&["SlowDown", "429", "503"]) {
        Reason::Busy
    } else {
        Reason::ServerError
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn a_directory_is_a_store() {
        let dir = tempfile::tempdir().unwrap();
        let place = Place { url: dir.path().join("a b").display().to_string(), ..Place::default() };
        let bucket = place.open(&Secrets::default()).unwrap();
        let path = "samples/date=2026-11-22/hour=19/service=my%20shop/h-1.parquet";
        runtime().block_on(async {
            bucket.put(path, Bytes::from_static(b"x")).await.unwrap();
            bucket.put(path, Bytes::from_static(b"xy")).await.unwrap();
            assert_eq!(bucket.list("samples").await.unwrap(), [(path.to_owned(), 2)]);
            assert_eq!(bucket.list("stacks").await.unwrap(), []);
            assert_eq!(bucket.get(path).await.unwrap(), "xy");
        });
        assert_eq!(std::fs::read(dir.path().join("a b").join(path)).unwrap(), b"xy");
    }

    #[test]
    fn what_is_no_store_is_told() {
        for (url, expected) in [
            ("ftp://x/y", "no store is known by ftp://"),
            ("s3://user:word@bucket/x", "the URL of a store has a password in it"),
            ("s3://", "s3:// names no bucket"),
            ("s3://user:word@bucket:x", "s3://[secret]@bucket:x is no URL"),
        ] {
            let told = Place::of(url).open(&Secrets::default()).unwrap_err().to_string();
            assert_eq!(told, expected);
        }
    }
}
