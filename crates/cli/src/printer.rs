//! All printing. Results go to stdout as tables or JSON, everything else to stderr.

use crate::exit::{ExitCode, Failure, Outcome};
use comfy_table::{ContentArrangement, Table, presets};
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    os::fd::{AsFd, BorrowedFd},
};
use tokio::{fs::File, io::AsyncWriteExt};

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

    /// Prints the result of a command that made something, and on stderr how, unless as JSON.
    pub fn made<T: Serialize>(self, value: &T, text: impl FnOnce() -> String, how: &str) -> Outcome {
        self.show(value, text)?;
        if !self.is_json() {
            self.note(how);
        }
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

    /// Prints a value as one line of JSON, or as `text` renders it.
    pub fn item<T: Serialize + ?Sized>(
        self,
        value: &T,
        text: impl FnOnce() -> String,
    ) -> Result<(), Failure> {
        match self.format {
            Format::Json => {
                self.line(&serde_json::to_string(value).map_err(|error| Failure::Output(error.into()))?)
            }
            Format::Table => self.line(&text()),
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

/// Writes a command's output, byte for byte and in order. Another thread does it: a stalled reader
/// must not block Ctrl-C.
pub struct Output(File);

impl Output {
    pub fn stdout() -> Result<Self, Failure> {
        Self::to(io::stdout().as_fd())
    }

    pub fn stderr() -> Result<Self, Failure> {
        Self::to(io::stderr().as_fd())
    }

    fn to(stream: BorrowedFd<'_>) -> Result<Self, Failure> {
        let copy = stream.try_clone_to_owned().map_err(Failure::Output)?;
        Ok(Self(File::from_std(copy.into())))
    }

    /// Returns once it is written.
    pub async fn write(&mut self, chunk: &[u8]) -> Result<(), Failure> {
        self.0.write_all(chunk).await.map_err(Failure::Output)?;
        self.0.flush().await.map_err(Failure::Output)
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
