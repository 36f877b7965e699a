//! All printing. Results go to stdout as tables or JSON, everything else to stderr.

use crate::exit::{ExitCode, Failure, Outcome, io_error};
use bytes::Bytes;
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    thread::JoinHandle,
};
use tokio::sync::mpsc;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Format {
    /// Tables and lines
    #[default]
    Table,
    /// JSON, as the API returns it
    Json,
}

#[derive(Debug, Clone, Copy)]
pub struct Printer {
    format: Format,
}

impl Printer {
    pub fn new(format: Format) -> Self {
        Self { format }
    }

    pub fn is_json(self) -> bool {
        self.format == Format::Json
    }

    /// Prints the result of a command, with which it succeeds.
    pub fn result<T: Serialize + ?Sized>(self, value: &T, text: impl FnOnce() -> String) -> Outcome {
        self.show(value, text)?;
        Ok(ExitCode::Success as i32)
    }

    /// Prints a value as JSON, or as `text` renders it.
    pub fn show<T: Serialize + ?Sized>(
        self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.format {
            Format::Json => self.json(value),
            Format::Table => {
                let text = text();
                if text.is_empty() { Ok(()) } else { self.line(&text) }
            }
        }
    }

    pub fn json<T: Serialize + ?Sized>(self, value: &T) -> Result<(), Failure> {
        let text = serde_json::to_string_pretty(value).map_err(|error| Failure::Output(error.into()))?;
        self.line(&text)
    }

    /// Prints a line of results.
    pub fn line(self, text: &str) -> Result<(), Failure> {
        let mut out = io::stdout().lock();
        writeln!(out, "{text}").and_then(|()| out.flush()).map_err(Failure::Output)
    }

    /// Prints a line to stderr. Failing to is no error.
    pub fn note(self, text: &str) {
        let _ = writeln!(io::stderr().lock(), "{text}");
    }
}

pub fn stderr_is_terminal() -> bool {
    io::stderr().is_terminal()
}

/// A table without borders: easy to read, and to cut.
pub fn table<const N: usize>(headings: [&str; N], rows: impl IntoIterator<Item = [String; N]>) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(headings);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    Stdout,
    Stderr,
}

/// Writes a command's output, byte for byte and in order. It does so on its own thread: a stalled
/// reader must not block Ctrl-C.
pub struct Output {
    chunks: mpsc::Sender<(Target, Bytes)>,
    thread: JoinHandle<io::Result<()>>,
}

impl Output {
    pub fn start() -> Result<Self, Failure> {
        let (chunks, mut inbox) = mpsc::channel::<(Target, Bytes)>(16);
        let write_all = move || {
            while let Some((target, chunk)) = inbox.blocking_recv() {
                match target {
                    Target::Stdout => {
                        let mut out = io::stdout().lock();
                        out.write_all(&chunk)?;
                        out.flush()?;
                    }
                    Target::Stderr => io::stderr().lock().write_all(&chunk)?,
                }
            }
            Ok(())
        };
        let thread = std::thread::Builder::new()
            .name("output".into())
            .spawn(write_all)
            .map_err(io_error("cannot start the output thread"))?;
        Ok(Self { chunks, thread })
    }

    /// Writes, waiting for room. False: there is no reader left, and [`Output::finish`] says why.
    pub async fn write(&self, target: Target, chunk: Bytes) -> bool {
        self.chunks.send((target, chunk)).await.is_ok()
    }

    /// Waits until everything is written.
    pub async fn finish(self) -> Result<(), Failure> {
        drop(self.chunks);
        let thread = self.thread;
        let joined = tokio::task::spawn_blocking(move || thread.join()).await;
        match joined {
            Ok(Ok(written)) => written.map_err(Failure::Output),
            _ => Err(Failure::Output(io::Error::other("the output thread died"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::table;

    #[test]
    fn tables_align_and_have_no_trailing_blanks() {
        let text = table(["A", "B"], [["long cell".into(), "x".into()], ["s".into(), String::new()]]);
        assert_eq!(text, "A          B\nlong cell  x\ns");
    }
}
