//! HTTP for all backends: one client each, with its TLS and its token, and failures classified by what can be done
//! about them.

use super::push::{PushError, Reason, of_status};
use super::secret::Secrets;
use anyhow::Context as _;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::{Certificate, Client, Identity, Method, Request, Response, Url};
use std::collections::BTreeMap;
use std::error::Error as _;
use std::io::Write as _;
use std::path::PathBuf;
use std::sync::Once;
use std::time::{Duration, SystemTime};
use tachyon::advice::Refusal;

/// Longest time until a connection is established.
const CONNECT: Duration = Duration::from_secs(10);
/// Most of an answer that is read: what a server says about an error is a line or two.
const LONGEST_ANSWER: usize = 64 << 10;
/// And most of it that is shown.
const LONGEST_TOLD: usize = 300;

/// How to reach a server, and what to present to it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Connection {
    /// Where it is.
    pub url: String,
    /// Certificates of authorities, in place of the system's.
    pub ca_file: Option<PathBuf>,
    /// The client's certificate, and its key.
    pub certificate: Option<(PathBuf, PathBuf)>,
    /// A bearer token.
    pub token_file: Option<PathBuf>,
    /// User, and the file of the password.
    pub basic: Option<(String, PathBuf)>,
    /// Headers that are no secrets.
    pub headers: BTreeMap<String, String>,
    /// For one request.
    pub timeout: Duration,
}

/// A server that takes requests.
#[derive(Debug)]
pub struct Server {
    client: Client,
    url: Url,
    headers: HeaderMap,
    connection: Connection,
    secrets: Secrets,
}

/// A complete answer.
#[derive(Debug)]
pub struct Answer {
    /// Headers.
    pub headers: HeaderMap,
    /// Body.
    pub body: Vec<u8>,
}

/// Chooses ring for encryption: once, for all clients.
pub fn choose_encryption() {
    static ONCE: Once = Once::new();
    // If another one is already installed, that is just as good.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// Checks a server's URL. It is shown in logs, so it must not contain a password, and no password may be sent in the clear.
///
/// # Errors
/// When it is not an HTTP URL, has a user in it, or a secret would leave the host unencrypted.
pub fn checked_url(text: &str, has_secret: bool) -> anyhow::Result<Url> {
    let url: Url = text.parse().with_context(|| format!("{} is no URL", shown(text)))?;
    let is_http = matches!(url.scheme(), "http" | "https") && url.has_host();
    let refused = |why: &str, hint: &str| Refusal::new(format!("{} {why}", shown(text))).with_hint(hint);
    if !is_http {
        return Err(refused("is no URL of HTTP", "it begins with http:// or https://").into());
    }
    if !url.username().is_empty() || url.password().is_some() {
        return Err(refused("has a user or a password in it", "give user, and password_file or token_file").into());
    }
    if has_secret && url.scheme() == "http" && !is_loopback(&url) {
        let hint = "use https, or a server or proxy on this host";
        return Err(refused("would get a secret that everybody on the way can read", hint).into());
    }
    Ok(url)
}

/// Compresses, with reproducible output.
#[must_use]
pub fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    // Writing to memory cannot fail.
    let _all = encoder.write_all(bytes);
    encoder.finish().unwrap_or_default()
}

fn is_loopback(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// A URL without what may be a password in it.
pub(crate) fn shown(url: &str) -> String {
    match (url.find("://"), url.rfind('@')) {
        (Some(scheme), Some(at)) if at > scheme => format!("{}[secret]{}", &url[..scheme + 3], &url[at..]),
        _ => url.to_owned(),
    }
}

impl Server {
    /// Reads certificates and makes the client; does not connect. `prior_http2`: gRPC without TLS.
    ///
    /// # Errors
    /// When the URL is invalid, a certificate cannot be read, or a header is invalid.
    pub fn new(connection: &Connection, secrets: &Secrets, prior_http2: bool) -> anyhow::Result<Self> {
        choose_encryption();
        let has_secret = connection.token_file.is_some() || connection.basic.is_some();
        let url = checked_url(&connection.url, has_secret)?;
        let mut client = Client::builder()
            .user_agent(concat!("tachyon-fleet/", env!("CARGO_PKG_VERSION")))
            // The target of a redirect would get the token.
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(CONNECT)
            .timeout(connection.timeout);
        if prior_http2 && url.scheme() == "http" {
            client = client.http2_prior_knowledge();
        }
        if let Some(file) = &connection.ca_file {
            let text = secrets.bytes(file)?;
            let authorities = Certificate::from_pem_bundle(&text);
            let authorities = authorities.with_context(|| format!("{} has no certificate", file.display()))?;
            anyhow::ensure!(!authorities.is_empty(), "{} has no certificate", file.display());
            client = client.tls_certs_only(authorities);
        }
        if let Some((certificate, key)) = &connection.certificate {
            let mut text = secrets.bytes(certificate)?;
            text.push(b'\n');
            text.extend(secrets.bytes(key)?);
            let told = || format!("{} and {} are no certificate with its key", certificate.display(), key.display());
            client = client.identity(Identity::from_pem(&text).with_context(told)?);
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &connection.headers {
            let name: HeaderName = name.parse().with_context(|| format!("{name} is no header"))?;
            let value = HeaderValue::from_str(value).with_context(|| format!("the header {name} has no such value"))?;
            headers.insert(name, value);
        }
        let client = client.build().context("cannot make an HTTP client")?;
        Ok(Self { client, url, headers, connection: connection.clone(), secrets: secrets.clone() })
    }

    /// Where it is, for people.
    #[must_use]
    pub fn shown(&self) -> String {
        shown(self.url.as_str())
    }

    /// A text without secrets. To be applied before cutting: half a secret is still a secret.
    #[must_use]
    pub fn scrub(&self, text: &str) -> String {
        self.secrets.scrub(text)
    }

    /// Its URL with `path` appended.
    #[must_use]
    pub fn at(&self, path: &str) -> Url {
        let mut url = self.url.clone();
        if !path.is_empty() {
            url.set_path(&format!("{}/{}", self.url.path().trim_end_matches('/'), path.trim_start_matches('/')));
        }
        url
    }

    /// Headers for each request, including the token as it is now.
    ///
    /// # Errors
    /// When the token cannot be read.
    pub fn headers(&self) -> Result<HeaderMap, PushError> {
        let mut headers = self.headers.clone();
        let secret = match (&self.connection.token_file, &self.connection.basic) {
            (Some(file), _) => Some(("Bearer ", file, None)),
            (None, Some((user, file))) => Some(("Basic ", file, Some(user))),
            (None, None) => None,
        };
        if let Some((scheme, file, user)) = secret {
            let configuration = |error: anyhow::Error| PushError::new(Reason::Configuration, format!("{error:#}"));
            let secret = self.secrets.read(file).map_err(configuration)?;
            let text = match user {
                None => format!("{scheme}{}", secret.expose()),
                Some(user) => {
                    use base64::Engine as _;
                    let pair = format!("{user}:{}", secret.expose());
                    let pair = self.secrets.remember(base64::engine::general_purpose::STANDARD.encode(pair));
                    format!("{scheme}{}", pair.expose())
                }
            };
            let value = HeaderValue::from_str(&text);
            let mut value =
                value.map_err(|_| PushError::new(Reason::Configuration, "the token is no header's value"))?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        Ok(headers)
    }

    /// Sends a request as it is.
    ///
    /// # Errors
    /// When there is no answer.
    pub async fn execute(&self, request: Request) -> Result<Response, PushError> {
        self.client.execute(request).await.map_err(|error| self.failure(error))
    }

    /// Posts, and reads the answer, which must confirm the push.
    ///
    /// # Errors
    /// When it was not accepted, or that is not known.
    pub async fn post(&self, url: Url, headers: HeaderMap, body: Vec<u8>) -> Result<Answer, PushError> {
        let mut request = Request::new(Method::POST, url);
        *request.headers_mut() = self.headers()?;
        request.headers_mut().extend(headers);
        *request.body_mut() = Some(body.into());
        let response = self.execute(request).await?;
        let status = response.status().as_u16();
        let after = retry_after(response.headers(), SystemTime::now());
        let headers = response.headers().clone();
        match of_status(status) {
            // It has been accepted, whatever happens to the rest of the answer.
            None => Ok(Answer { headers, body: body_of(response).await }),
            Some((reason, doubtful)) => {
                let place = headers.get("location").and_then(|place| place.to_str().ok());
                let said = match place {
                    Some(place) => format!("it redirects to {}", shown(place)),
                    None => told(self.scrub(&String::from_utf8_lossy(&body_of(response).await)).as_bytes()),
                };
                let said = if said.is_empty() { String::new() } else { format!(": {said}") };
                let message = format!("{} answers {status}{said}", self.shown());
                let error = PushError::new(reason, self.secrets.scrub(&message)).after(after);
                let error = if doubtful { error.in_doubt() } else { error };
                Err(self.with_hint(error))
            }
        }
    }

    /// Adds what to do about an error.
    #[must_use]
    pub fn with_hint(&self, error: PushError) -> PushError {
        let has_secret = self.connection.token_file.is_some() || self.connection.basic.is_some();
        match error.reason {
            Reason::Unauthorized if has_secret => error.with_hint("the token or password is refused: renew its file"),
            Reason::Unauthorized => error.with_hint("it wants a token: give token_file, or user and password_file"),
            _ => error,
        }
    }

    fn failure(&self, error: reqwest::Error) -> PushError {
        let causes = causes(&error);
        let message = |what: &str| self.secrets.scrub(&format!("{}: {what}", self.shown()));
        let is_tls = has_tls(&error);
        if is_tls {
            let hint = match self.connection.ca_file {
                Some(_) => "its certificate is not signed by what ca_file has, or is for another name",
                None => "give ca_file if an authority of your own signs its certificate",
            };
            let ours = causes.contains("alert");
            let hint = if ours { "the server refuses our certificate: see cert_file and key_file" } else { hint };
            return PushError::new(Reason::Tls, message(&causes)).with_hint(hint);
        }
        if error.is_connect() {
            if causes.contains("tunnel") || causes.contains("proxy") {
                let hint = "the environment's HTTPS_PROXY, HTTP_PROXY and NO_PROXY say which proxy is used";
                return PushError::new(Reason::Proxy, message(&causes)).with_hint(hint);
            }
            return PushError::new(Reason::Unreachable, message(&causes));
        }
        if error.is_timeout() {
            let seconds = self.connection.timeout.as_secs_f64();
            return PushError::new(Reason::Timeout, message(&format!("no answer within {seconds} s"))).in_doubt();
        }
        // Something was sent.
        PushError::new(Reason::Broken, message(&causes)).in_doubt()
    }
}

/// All causes as one line, without the URL of the first one, which is already shown.
fn causes(error: &reqwest::Error) -> String {
    let mut texts: Vec<String> = Vec::new();
    let mut cause = error.source();
    while let Some(error) = cause {
        let text = error.to_string();
        if texts.iter().all(|told| !told.contains(&text)) {
            texts.push(text);
        }
        cause = error.source();
    }
    if texts.is_empty() { "the request failed".to_owned() } else { texts.join(": ") }
}

fn has_tls(error: &reqwest::Error) -> bool {
    let mut cause = error.source();
    while let Some(error) = cause {
        // One I/O error may contain another.
        let mut inner = error;
        while let Some(held) = inner.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref) {
            inner = held;
        }
        if inner.is::<rustls::Error>() {
            return true;
        }
        cause = error.source();
    }
    false
}

/// As much of an answer as is useful.
async fn body_of(mut response: Response) -> Vec<u8> {
    let mut body = Vec::new();
    while let Ok(Some(piece)) = response.chunk().await {
        body.extend_from_slice(&piece[..piece.len().min(LONGEST_ANSWER - body.len())]);
        if body.len() == LONGEST_ANSWER {
            break;
        }
    }
    body
}

/// What a server says about an error, as part of a line. An answer may be binary, or a page.
#[must_use]
pub fn told(body: &[u8]) -> String {
    let text: String = String::from_utf8_lossy(body)
        .chars()
        .map(|character| if character.is_control() || character == '\u{fffd}' { ' ' } else { character })
        .collect();
    let words: Vec<&str> = text.split_whitespace().collect();
    let line = words.join(" ");
    let mut end = LONGEST_TOLD.min(line.len());
    while !line.is_char_boundary(end) {
        end -= 1;
    }
    if end < line.len() { format!("{} …", &line[..end]) } else { line }
}

/// `Retry-After`: seconds or a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?;
    match text.parse() {
        Ok(seconds) => Some(Duration::from_secs(seconds)),
        Err(_) => httpdate::parse_http_date(text).ok()?.duration_since(now).ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls() {
        for (url, has_secret, expected) in [
            ("https://collector:4318/x", true, ""),
            ("http://127.0.0.1:4040", true, ""),
            ("http://[::1]:4040", true, ""),
            ("http://collector:4318", false, ""),
            (
                "http://collector:4318",
                true,
                "http://collector:4318 would get a secret that everybody on the way can read",
            ),
            ("https://a:b@collector", false, "https://[secret]@collector has a user or a password in it"),
            ("s3://bucket", false, "s3://bucket is no URL of HTTP"),
            ("collector:4317", false, "collector:4317 is no URL of HTTP"),
            ("/x", false, "/x is no URL"),
        ] {
            let told = checked_url(url, has_secret).err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(told, expected, "{url}");
        }
    }

    #[test]
    fn a_password_is_in_no_message_in_either_form() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("password"), "open sesame\n").unwrap();
        let connection = Connection {
            url: "http://127.0.0.1:1".to_owned(),
            basic: Some(("ali".to_owned(), dir.path().join("password"))),
            ..Connection::default()
        };
        let server = Server::new(&connection, &Secrets::default(), false).unwrap();
        assert_eq!(server.headers().unwrap()[AUTHORIZATION], "Basic YWxpOm9wZW4gc2VzYW1l");
        let said = "no user has open sesame (YWxpOm9wZW4gc2VzYW1l)";
        assert_eq!(server.scrub(said), "no user has [secret] ([secret])");
    }

    #[test]
    fn what_servers_say_is_a_part_of_a_line() {
        assert_eq!(told(b"<html>\n too\x1b[2J  large\xff</html>\r\n"), "<html> too [2J large </html>");
        assert_eq!(told("ü".repeat(400).as_bytes()), format!("{} …", "ü".repeat(150)));
    }

    #[test]
    fn when_to_ask_again() {
        let after = |text: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(RETRY_AFTER, text.parse().unwrap());
            retry_after(&headers, SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777 - 30))
        };
        assert_eq!(after("7"), Some(Duration::from_secs(7)));
        assert_eq!(after("Sun, 06 Nov 1994 08:49:37 GMT"), Some(Duration::from_secs(30)));
        assert_eq!(after("soon"), None);
    }
}
