//! The time, which tests let run faster.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// A clock.
#[derive(Clone, Copy, Debug, Default)]
pub struct Clock {
    test: Option<Test>,
}

#[derive(Clone, Copy, Debug)]
struct Test {
    began: Instant,
    unix: f64,
    speed: f64,
}

impl Clock {
    /// The system's.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// One that begins at this moment (seconds since 1970) and runs `speed` times as fast.
    #[must_use]
    pub fn starting(unix: f64, speed: f64) -> Self {
        Self { test: Some(Test { began: Instant::now(), unix, speed }) }
    }

    /// Seconds since 1970, UTC.
    #[must_use]
    pub fn unix(&self) -> f64 {
        match self.test {
            None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
            Some(Test { began, unix, speed }) => unix + began.elapsed().as_secs_f64() * speed,
        }
    }

    /// Waits.
    pub async fn sleep(&self, time: Duration) {
        let speed = self.test.map_or(1.0, |test| test.speed);
        tokio::time::sleep(time.div_f64(speed)).await;
    }
}
