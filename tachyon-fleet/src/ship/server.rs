//! `/metrics` and `/healthz`, on this host only.

use super::shared::Shared;
use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Most connections at once: a scraper needs one.
const MOST: usize = 16;
/// Longest time until a request's head has arrived.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time that a connection stays open.
const LONGEST: Duration = Duration::from_secs(60);

/// Answers requests until the task is ended.
pub async fn serve(listener: TcpListener, shared: Arc<Shared>) {
    let slots = Arc::new(Semaphore::new(MOST));
    loop {
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            // Out of descriptors, for example, which will pass.
            Err(_) => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let shared = Arc::clone(&shared);
        tokio::spawn(async move {
            let answer = service_fn(move |request| {
                let answer = answer(&shared, &request);
                async move { Ok::<_, Infallible>(answer) }
            });
            let mut http = hyper::server::conn::http1::Builder::new();
            http.timer(TokioTimer::new()).header_read_timeout(PATIENCE);
            let connection = http.serve_connection(TokioIo::new(stream), answer);
            // A client that goes away has what it wanted.
            let _gone = tokio::time::timeout(LONGEST, connection).await;
            drop(slot);
        });
    }
}

fn answer(shared: &Shared, request: &Request<Incoming>) -> Response<Full<Bytes>> {
    let of = |status: StatusCode, kind: &'static str, text: String| {
        let response = Response::builder().status(status).header("content-type", kind);
        response.header("x-content-type-options", "nosniff").body(Full::from(text)).unwrap_or_default()
    };
    if request.method() != Method::GET && request.method() != Method::HEAD {
        return of(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "GET only\n".to_owned());
    }
    match request.uri().path() {
        "/metrics" => of(StatusCode::OK, super::metrics::CONTENT_TYPE, shared.metrics_text()),
        "/healthz" => {
            let trouble = shared.trouble();
            let status = if trouble.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
            let text = serde_json::json!({ "healthy": trouble.is_empty(), "trouble": trouble }).to_string();
            of(status, "application/json", text + "\n")
        }
        _ => of(StatusCode::NOT_FOUND, "text/plain", "/metrics, /healthz\n".to_owned()),
    }
}
