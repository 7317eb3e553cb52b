//! Everything that uses the network: secrets, the HTTP client with its TLS, errors classified by what can be done about them,
//! and object stores by their URL.

pub mod bucket;
pub mod http;
pub mod push;
pub mod secret;
