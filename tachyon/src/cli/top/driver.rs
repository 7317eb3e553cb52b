//! Runs the recording: a thread that cuts it again and again, and hands over the segments.

use crate::analysis::live::{Batch, BatchSink};
use crate::profile::Profile;
use crate::recording::{Opened, Over, Running, Segment};
use crate::report::Report;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;

/// A segment with its samples.
#[derive(Debug, Default)]
pub struct Taken {
    /// The processes, threads and frames that its samples refer to.
    pub profile: Profile,
    /// Its account.
    pub report: Report,
    /// Its samples.
    pub batch: Batch,
    /// What works less well than it should.
    pub notes: Vec<String>,
}

/// Messages from the thread.
pub enum Message {
    /// A segment has ended.
    Segment(Box<Taken>),
    /// Something now works less well than it should.
    Told(String),
    /// There is nothing more to record, and why.
    Over(String),
    /// It cannot go on.
    Failed(anyhow::Error),
}

/// Where samples go while a recording runs.
pub struct Taking(BatchSink);

/// Starts sampling.
///
/// # Errors
/// When the kernel refuses.
pub fn begin(opened: Opened) -> anyhow::Result<(Running, Taking)> {
    let sink = BatchSink::default();
    let running = opened.start_into(|_| Ok(Box::new(sink.clone())))?;
    Ok((running, Taking(sink)))
}

impl Taking {
    /// Ends the present segment.
    ///
    /// # Errors
    /// When the kernel refuses, or a thread of the recorder has ended early.
    pub fn cut(&mut self, running: &mut Running) -> anyhow::Result<Taken> {
        let next = BatchSink::default();
        let Segment { profile, report, notes, .. } = running.cut_into(|_| Ok(Box::new(next.clone())))?;
        let batch = std::mem::replace(&mut self.0, next).take();
        Ok(Taken { profile, report, batch, notes })
    }
}

/// Why a recording is over, for people.
pub fn reason(over: Over) -> &'static str {
    match over {
        Over::TargetsGone => "all processes have ended",
        Over::NoMemory => "the limit of memory is reached",
        Over::SinkFailed => "samples cannot be kept any more",
    }
}

/// The thread.
pub struct Driver {
    /// It ends when this is dropped.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Driver {
    /// Cuts the recording at once, so that the cost of the start is a segment of its own, and then after each `delay`.
    ///
    /// # Errors
    /// When the thread cannot be made.
    pub fn start(
        mut running: Running,
        mut taking: Taking,
        delay: Duration,
        messages: UnboundedSender<Message>,
    ) -> std::io::Result<Self> {
        let (stop, stopped) = channel::<()>();
        let thread = std::thread::Builder::new().name("tachyon-top".to_owned()).spawn(move || {
            // The receiver is gone only when the view is over.
            let send = |message| drop(messages.send(message));
            let mut turn = || -> anyhow::Result<Option<Over>> {
                let taken = taking.cut(&mut running)?;
                taken.notes.iter().for_each(|note| send(Message::Told(note.clone())));
                send(Message::Segment(Box::new(taken)));
                let status = running.status()?;
                status.told.into_iter().for_each(|told| send(Message::Told(told)));
                Ok(status.over)
            };
            loop {
                match turn() {
                    Ok(None) => {}
                    Ok(Some(over)) => return send(Message::Over(reason(over).to_owned())),
                    Err(error) => return send(Message::Failed(error)),
                }
                if stopped.recv_timeout(delay) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }

    /// Ends the recording.
    pub fn stop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its panic is on standard error.
            let _panicked = thread.join();
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.stop();
    }
}
