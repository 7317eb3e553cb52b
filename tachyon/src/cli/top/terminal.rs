//! The terminal: taken over for the view, and restored at its end, whatever ends it.
//!
//! Signals end the view's loop like a key does; a panic of any thread restores the terminal before it is printed, and ends
//! the view, too.

use super::model::Model;
use super::view;
use crossterm::event::{Event, poll, read};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use crossterm::{cursor, execute};
use nix::sys::signal::{Signal, raise};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use std::io::{self, Stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// How long the thread that reads keys may go on after the end.
const PATIENCE: Duration = Duration::from_millis(100);

/// A thread has panicked, and the terminal has been restored.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The terminal while the view has it. Dropping it restores the terminal.
pub struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    colours: bool,
}

impl Screen {
    /// Takes over the terminal.
    ///
    /// # Errors
    /// When it refuses.
    pub fn enter(no_color: bool) -> io::Result<Self> {
        let before = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            PANICKED.store(true, Ordering::Relaxed);
            leave();
            before(info);
        }));
        take().inspect_err(|_| leave())?;
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout())).inspect_err(|_| leave())?;
        Ok(Self { terminal, colours: !no_color })
    }

    /// Shows the view.
    ///
    /// # Errors
    /// When the terminal cannot be written.
    pub fn draw(&mut self, model: &Model) -> io::Result<()> {
        self.terminal.draw(|frame| view::draw(frame, model, self.colours))?;
        Ok(())
    }

    /// Makes the next view be drawn completely, over whatever another program wrote.
    ///
    /// # Errors
    /// When the terminal cannot be written.
    pub fn clear(&mut self) -> io::Result<()> {
        self.terminal.clear()
    }

    /// Restores the terminal, stops this process (Ctrl-Z), and takes over the terminal again when it continues.
    ///
    /// # Errors
    /// When the terminal refuses.
    pub fn suspend(&mut self) -> io::Result<()> {
        leave();
        raise(Signal::SIGTSTP)?;
        take()?;
        self.terminal.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        leave();
    }
}

fn take() -> io::Result<()> {
    enable_raw_mode()?;
    execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)
}

/// Restores everything that can be restored, even if a step fails: the terminal may be gone.
fn leave() {
    let _gone = disable_raw_mode();
    let _gone = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
}

/// Whether all threads are well.
///
/// # Errors
/// When one has panicked; the panic has been printed.
pub fn check_threads() -> anyhow::Result<()> {
    anyhow::ensure!(!PANICKED.load(Ordering::Relaxed), "a thread ended early");
    Ok(())
}

/// Starts a thread that reads keys. The other half of the result stops it.
///
/// # Errors
/// When the thread cannot be made.
pub fn read_input() -> io::Result<(UnboundedReceiver<io::Result<Event>>, impl FnOnce())> {
    let (sender, input) = unbounded_channel();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    std::thread::Builder::new().name("tachyon-keys".to_owned()).spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            let event = match poll(PATIENCE) {
                Ok(false) => continue,
                Ok(true) => read(),
                Err(error) => Err(error),
            };
            let failed = event.is_err();
            if sender.send(event).is_err() || failed {
                return;
            }
        }
    })?;
    // The thread is not waited for: if the terminal is gone, crossterm never stops looking for keys.
    Ok((input, move || stop.store(true, Ordering::Relaxed)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::Read as _;
    use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
    use std::process::{Command, Stdio};

    /// Set in the process that has the terminal.
    const INSIDE: &str = "TACHYON_TEST_PANICS_IN_A_TERMINAL";
    const SAID: &str = "this thread panics for a test";

    fn settings(terminal: &OwnedFd) -> [libc::tcflag_t; 4] {
        // SAFETY: all-zero is a valid `termios`.
        let mut termios: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: the structure outlives the call.
        assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &raw mut termios) }, 0);
        [termios.c_iflag, termios.c_oflag, termios.c_cflag, termios.c_lflag]
    }

    /// The test runs itself again in a terminal, where a thread panics and nothing else restores the terminal.
    #[test]
    fn a_panic_of_any_thread_gives_the_terminal_back_before_it_is_told() {
        if std::env::var_os(INSIDE).is_some() {
            let screen = Screen::enter(false).expect("it runs in a terminal");
            let panicked = std::thread::spawn(|| panic!("{SAID}")).join();
            assert!(panicked.is_err() && check_threads().is_err());
            std::mem::forget(screen);
            std::process::exit(7);
        }
        let (mut ours, mut theirs) = (-1, -1);
        let (name, like, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        // SAFETY: both numbers outlive the call; name, settings and size are left out.
        assert_eq!(unsafe { libc::openpty(&raw mut ours, &raw mut theirs, name, like, size) }, 0);
        // SAFETY: the descriptor is new and has no other owner.
        let (mut ours, theirs) = (unsafe { File::from_raw_fd(ours) }, theirs);
        // SAFETY: as above.
        let theirs = unsafe { OwnedFd::from_raw_fd(theirs) };
        let before = settings(&theirs);
        let end = || Stdio::from(theirs.try_clone().unwrap());
        let name = "cli::top::terminal::tests::a_panic_of_any_thread_gives_the_terminal_back_before_it_is_told";
        let mut inside = Command::new(std::env::current_exe().unwrap());
        inside.args(["--exact", name, "--nocapture"]).env(INSIDE, "1").stdin(end()).stdout(end()).stderr(end());
        let status = inside.status().unwrap();
        drop(inside);
        assert_eq!(settings(&theirs), before, "keys do not come as they did");
        drop(theirs);
        let mut output = Vec::new();
        // Reading from a terminal that nothing holds any more ends with an error.
        let _ended = ours.read_to_end(&mut output);
        let output = String::from_utf8_lossy(&output);
        assert_eq!(status.code(), Some(7), "{output}");
        let at = |text: &str| output.rfind(text).unwrap_or_else(|| panic!("no {text:?} in {output:?}"));
        assert!(at("\x1b[?1049h") < at("\x1b[?1049l") && at("\x1b[?1049l") < at(SAID), "{output:?}");
        assert!(at("\x1b[?25l") < at("\x1b[?25h") && at("\x1b[?25h") < at(SAID), "{output:?}");
    }
}
