//! Progress on stderr: a spinner on a terminal, plain lines elsewhere, and only after a second.

use crate::printer::stderr_is_terminal;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::{io::Write, time::Duration};
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_secs(1);

/// An operation in progress. Dropping it ends the display.
pub struct Progress {
    bar: ProgressBar,
    waiting: JoinHandle<()>,
    terminal: bool,
}

impl Progress {
    /// Must be called within the runtime.
    pub fn start(message: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        bar.set_message(message.into());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
            bar.set_style(style);
        }
        let terminal = stderr_is_terminal();
        let waiting = tokio::spawn(show_later(bar.clone(), terminal));
        Self { bar, waiting, terminal }
    }

    /// Sets the message.
    pub fn set(&self, text: impl Into<String>) {
        self.bar.set_message(text.into());
    }

    /// Sets the message, and prints it where there is no spinner.
    pub fn step(&self, text: impl Into<String>) {
        let text = text.into();
        if !self.terminal {
            let _ = writeln!(std::io::stderr().lock(), "{text}");
            // Don't print it again after a second.
            self.waiting.abort();
        }
        self.set(text);
    }

    /// Prints a line above the spinner.
    pub fn note(&self, text: &str) {
        self.bar.suspend(|| {
            let _ = writeln!(std::io::stderr().lock(), "{text}");
        });
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.waiting.abort();
        self.bar.finish_and_clear();
    }
}

async fn show_later(bar: ProgressBar, terminal: bool) {
    tokio::time::sleep(PATIENCE).await;
    if terminal {
        bar.set_draw_target(ProgressDrawTarget::stderr());
        bar.enable_steady_tick(Duration::from_millis(100));
    } else {
        let _ = writeln!(std::io::stderr().lock(), "{} ...", bar.message());
    }
}
