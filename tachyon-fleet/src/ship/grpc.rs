//! gRPC over the same HTTP client as everything else, so certificates, tokens and proxies work the same way, with the same
//! errors.

use crate::net::http::{Server, told};
use crate::net::push::{PushError, Reason};
use http_body_util::BodyExt as _;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tonic::body::Body;
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::{Code, Request, Status};
use tower_service::Service;

/// Sends one message and waits for the answer.
///
/// # Errors
/// When it was not accepted, or that is not known.
pub async fn unary<M, R>(server: &Arc<Server>, path: &'static str, message: M) -> Result<R, PushError>
where
    M: prost::Message + Send + Sync + 'static,
    R: prost::Message + Default + Send + Sync + 'static,
{
    let channel = Channel { server: Arc::clone(server) };
    // Go's servers answer with the compression of the request.
    let gzip = CompressionEncoding::Gzip;
    let mut client = tonic::client::Grpc::new(channel).send_compressed(gzip).accept_compressed(gzip);
    let codec = tonic_prost::ProstCodec::<M, R>::default();
    let path = http::uri::PathAndQuery::from_static(path);
    match client.unary(Request::new(message), path, codec).await {
        Ok(answer) => Ok(answer.into_inner()),
        Err(status) => Err(failure(server, status)),
    }
}

/// An HTTP client in the form that gRPC needs.
#[derive(Clone)]
struct Channel {
    server: Arc<Server>,
}

impl Service<http::Request<Body>> for Channel {
    type Response = http::Response<reqwest::Body>;
    type Error = tonic::Status;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let server = Arc::clone(&self.server);
        Box::pin(async move {
            let in_words = |error: PushError| {
                let mut status = Status::new(Code::Unknown, error.to_string());
                status.set_source(Arc::new(error));
                status
            };
            let (parts, body) = request.into_parts();
            // The message is in memory anyway.
            let body = body.collect().await?.to_bytes();
            let url = server.at(parts.uri.path());
            let mut request = reqwest::Request::new(parts.method, url);
            *request.version_mut() = http::Version::HTTP_2;
            *request.headers_mut() = server.headers().map_err(in_words)?;
            request.headers_mut().extend(parts.headers);
            *request.body_mut() = Some(body.into());
            let response = server.execute(request).await.map_err(in_words)?;
            // Not gRPC at all: a proxy's or a web server's answer.
            if let Some((reason, doubtful)) = crate::net::push::of_status(response.status().as_u16()) {
                let message = format!("{} answers {}, and not as gRPC", server.shown(), response.status());
                let error = server.with_hint(PushError::new(reason, message));
                return Err(in_words(if doubtful { error.in_doubt() } else { error }));
            }
            Ok(response.into())
        })
    }
}

/// A status, classified by what can be done about it (opentelemetry.io/docs/specs/otlp, "Failures").
fn failure(server: &Server, status: Status) -> PushError {
    let mut source = std::error::Error::source(&status);
    while let Some(error) = source {
        if let Some(known) = error.downcast_ref::<PushError>() {
            return PushError { hint: known.hint.clone(), message: known.message.clone(), ..*known };
        }
        source = error.source();
    }
    let said = told(server.scrub(status.message()).as_bytes());
    let message = format!("{}: {}: {said}", server.shown(), name(status.code()));
    let is_large = status.message().contains("larger than max") || status.message().contains("message too large");
    let (reason, doubtful) = match status.code() {
        Code::Unauthenticated | Code::PermissionDenied => (Reason::Unauthorized, false),
        Code::Unimplemented | Code::NotFound => (Reason::NotFound, false),
        Code::ResourceExhausted | Code::OutOfRange if is_large => (Reason::TooLarge, false),
        Code::ResourceExhausted | Code::Unavailable => (Reason::Busy, false),
        Code::DeadlineExceeded | Code::Cancelled => (Reason::Timeout, true),
        Code::Aborted | Code::OutOfRange | Code::DataLoss | Code::Internal | Code::Unknown => {
            (Reason::ServerError, true)
        }
        _ => (Reason::Rejected, false),
    };
    let error = PushError::new(reason, message).after(pushback(status.metadata()));
    let error = if doubtful { error.in_doubt() } else { error };
    match reason {
        Reason::NotFound => error.with_hint(
            "the server takes no profiles: a Collector needs a pipeline of profiles and --feature-gates=service.profilesSupport",
        ),
        Reason::TooLarge => error.with_hint("make otlp.max_message smaller, or the server's limit larger"),
        _ => server.with_hint(error),
    }
}

/// How long the server wants the client to wait.
fn pushback(metadata: &MetadataMap) -> Option<Duration> {
    let ms = metadata.get("grpc-retry-pushback-ms")?.to_str().ok()?.parse().ok()?;
    Some(Duration::from_millis(ms))
}

/// As the protocol's documents call it.
fn name(code: Code) -> &'static str {
    match code {
        Code::Ok => "OK",
        Code::Cancelled => "CANCELLED",
        Code::Unknown => "UNKNOWN",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::NotFound => "NOT_FOUND",
        Code::AlreadyExists => "ALREADY_EXISTS",
        Code::PermissionDenied => "PERMISSION_DENIED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        Code::FailedPrecondition => "FAILED_PRECONDITION",
        Code::Aborted => "ABORTED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unimplemented => "UNIMPLEMENTED",
        Code::Internal => "INTERNAL",
        Code::Unavailable => "UNAVAILABLE",
        Code::DataLoss => "DATA_LOSS",
        Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::http::Connection;
    use crate::net::secret::Secrets;

    #[test]
    fn a_status_has_no_secret_in_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "hunter2").unwrap();
        let token_file = Some(dir.path().join("token"));
        let connection = Connection { url: "http://127.0.0.1:1".to_owned(), token_file, ..Connection::default() };
        let server = Server::new(&connection, &Secrets::default(), true).unwrap();
        server.headers().unwrap();
        let error = failure(&server, Status::unauthenticated("hunter2 is no token"));
        assert_eq!(error.message, "http://127.0.0.1:1/: UNAUTHENTICATED: [secret] is no token");
        let half = failure(&server, Status::internal("x".repeat(297) + "hunter2"));
        assert!(!half.message.contains("hun"), "{}", half.message);
    }
}
