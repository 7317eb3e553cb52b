//! Passwords and tokens: read from files when they are needed, and never shown.

use anyhow::{Context as _, ensure};
use std::fmt;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Longest file that is read: even certificates of whole chains are shorter.
const LONGEST: u64 = 64 << 10;
/// What is shown in its place.
const HIDDEN: &str = "[secret]";

/// A text that is not shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The text, for its intended recipient.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(HIDDEN)
    }
}

/// Where secrets are stored, and all that have been read, so that no message contains one.
#[derive(Clone, Debug, Default)]
pub struct Secrets {
    /// The directory of systemd's `LoadCredential`.
    credentials: Option<PathBuf>,
    known: Arc<Mutex<Vec<Secret>>>,
}

impl Secrets {
    /// With systemd's directory of credentials, if there is one.
    #[must_use]
    pub fn of_this_service() -> Self {
        Self { credentials: std::env::var_os("CREDENTIALS_DIRECTORY").map(PathBuf::from), ..Self::default() }
    }

    /// Where a file named in the configuration is: a bare name is one of systemd's credentials.
    #[must_use]
    pub fn place(&self, file: &Path) -> PathBuf {
        match &self.credentials {
            Some(directory) if file.is_relative() => directory.join(file),
            _ => file.to_owned(),
        }
    }

    /// Reads one, without the line break at its end. It is read again each time, because tokens are renewed.
    ///
    /// # Errors
    /// When it cannot be read, is empty, longer than any token, or has a line break in it.
    pub fn read(&self, file: &Path) -> anyhow::Result<Secret> {
        let bytes = self.bytes(file)?;
        let path = self.place(file);
        let text = String::from_utf8(bytes).ok().with_context(|| format!("{} is no text", path.display()))?;
        let text = text.trim_end_matches(['\r', '\n']).to_owned();
        ensure!(!text.is_empty(), "{} is empty", path.display());
        ensure!(!text.contains(char::is_control), "{} has more than one line, or control characters", path.display());
        Ok(self.remember(text))
    }

    /// Remembers another form of a secret, which no message may show either.
    pub fn remember(&self, text: String) -> Secret {
        let secret = Secret(text);
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&secret) {
            known.push(secret.clone());
        }
        secret
    }

    /// Reads a file of several lines, such as a certificate's key.
    ///
    /// # Errors
    /// When it cannot be read, or is too long.
    pub fn bytes(&self, file: &Path) -> anyhow::Result<Vec<u8>> {
        let path = self.place(file);
        let cannot = || format!("cannot read {}", path.display());
        let mut bytes = Vec::new();
        let file = tachyon::input::open(&path).with_context(cannot)?;
        file.take(LONGEST + 1).read_to_end(&mut bytes).with_context(cannot)?;
        ensure!(bytes.len() as u64 <= LONGEST, "{}: it is longer than {LONGEST} bytes", cannot());
        Ok(bytes)
    }

    /// A message from anywhere, with all secrets removed.
    #[must_use]
    pub fn scrub(&self, message: &str) -> String {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.iter().fold(message.to_owned(), |message, secret| message.replace(secret.expose(), HIDDEN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_in_no_message() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        std::fs::write(&path, "hunter2\n").unwrap();
        let secrets = Secrets { credentials: Some(dir.path().to_owned()), ..Secrets::default() };
        let secret = secrets.read(Path::new("token")).unwrap();
        assert_eq!(secret.expose(), "hunter2");
        assert_eq!(format!("{secret:?} {secrets:?}").matches("hunter2").count(), 0);
        assert_eq!(secrets.scrub("GET /?sig=hunter2: refused"), "GET /?sig=[secret]: refused");
    }

    #[test]
    fn what_is_no_token_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let told = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Secrets::default().read(&path).unwrap_err().to_string()
        };
        assert!(told(b"\n").ends_with("is empty"));
        assert!(told(b"a\nb").contains("more than one line"));
        assert!(told(b"\xff").ends_with("is no text"));
        assert!(told(&vec![b'a'; 70_000]).contains("longer than 65536 bytes"));
        assert!(Secrets::default().read(Path::new("/none")).unwrap_err().to_string().contains("cannot read /none"));
    }
}
