//! A command on a terminal: bytes both ways, and its size.

use crate::{
    error::{Error, Result},
    sandboxes::path,
    socket::{Socket, broken},
    transport::Client,
};
use bytes::Bytes;
use futures::{SinkExt, StreamExt, stream};
use keiki_types::SandboxId;
use serde::Deserialize;
use tokio_tungstenite::tungstenite::Message;

/// What to run on the terminal.
#[derive(Debug, Clone, Default)]
pub struct PtyRequest {
    /// Columns.
    pub cols: u32,
    /// Rows.
    pub rows: u32,
    /// A shell line; default the user's login shell.
    pub cmd: Option<String>,
    /// Working directory.
    pub cwd: Option<String>,
    /// User name or `uid[:gid]`.
    pub user: Option<String>,
    /// Let the command go on when the connection is lost.
    pub keep: bool,
}

/// What comes from the terminal. `Exit` is last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PtyEvent {
    /// Output.
    Output(Bytes),
    /// The command's exit code.
    Exit(i32),
    /// It was left, and goes on.
    Detached,
}

/// A terminal in a sandbox. Dropping both halves kills the command, unless it is kept.
pub struct Pty {
    /// The command's id, to come back to.
    pub exec: String,
    /// To the command.
    pub input: PtyInput,
    /// From the command.
    pub output: PtyOutput,
}

/// Keys and sizes to the command.
pub struct PtyInput(stream::SplitSink<Socket, Message>);

/// Output of the command.
pub struct PtyOutput(stream::SplitStream<Socket>);

impl Client {
    /// Starts a command on a new terminal.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn pty(&self, id: SandboxId, request: &PtyRequest) -> Result<Pty> {
        let mut query = vec![("cols", request.cols.to_string()), ("rows", request.rows.to_string())];
        let texts = [("cmd", &request.cmd), ("cwd", &request.cwd), ("user", &request.user)];
        query.extend(texts.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))));
        query.extend(request.keep.then(|| ("keep", "true".into())));
        let (socket, exec) = self.socket(&path(id, "/exec/pty"), &query).await?;
        Ok(Pty::new(socket, exec.unwrap_or_default()))
    }

    /// Comes back to a command on its terminal. What it wrote last comes first: `tail` bytes of it. Whoever was there
    /// is sent away. Dropping both halves leaves the command as it is.
    ///
    /// # Errors
    /// As [`Error`] says.
    pub async fn attach_pty(&self, id: SandboxId, exec: &str, tail: u64) -> Result<Pty> {
        let at = path(id, &format!("/execs/{exec}/pty"));
        let (socket, _) = self.socket(&at, &[("tail", tail.to_string())]).await?;
        Ok(Pty::new(socket, exec.into()))
    }
}

impl Pty {
    fn new(socket: Socket, exec: String) -> Self {
        let (input, output) = socket.split();
        Self { exec, input: PtyInput(input), output: PtyOutput(output) }
    }
}

impl PtyInput {
    /// Types.
    ///
    /// # Errors
    /// If the connection is gone.
    pub async fn send(&mut self, bytes: Bytes) -> Result<()> {
        self.0.send(Message::Binary(bytes)).await.map_err(broken)
    }

    /// Leaves the command, which goes on.
    ///
    /// # Errors
    /// If the connection is gone.
    pub async fn detach(&mut self) -> Result<()> {
        self.0.send(Message::Text(r#"{"detach":true}"#.into())).await.map_err(broken)
    }

    /// Sends a signal to every process of the command.
    ///
    /// # Errors
    /// If the connection is gone.
    pub async fn signal(&mut self, signal: i32) -> Result<()> {
        let text = serde_json::json!({"signal": signal}).to_string();
        self.0.send(Message::Text(text.into())).await.map_err(broken)
    }

    /// Tells the terminal its size.
    ///
    /// # Errors
    /// If the connection is gone.
    pub async fn resize(&mut self, cols: u32, rows: u32) -> Result<()> {
        let text = serde_json::json!({"resize": {"cols": cols, "rows": rows}}).to_string();
        self.0.send(Message::Text(text.into())).await.map_err(broken)
    }
}

impl PtyOutput {
    /// The next piece. Nothing follows the exit code.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the connection ends without an exit code.
    pub async fn next(&mut self) -> Result<PtyEvent> {
        loop {
            match self.0.next().await {
                Some(Ok(Message::Binary(bytes))) => return Ok(PtyEvent::Output(bytes)),
                Some(Ok(Message::Text(text))) => return last_word(&text),
                Some(Ok(Message::Close(_))) | None => return Err(Error::Interrupted),
                Some(Ok(_)) => {}
                Some(Err(error)) => return Err(broken(error)),
            }
        }
    }
}

fn last_word(text: &str) -> Result<PtyEvent> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Word {
        Exit { exit_code: i32 },
        Failed { error: String },
        Left { detached: bool },
    }
    match serde_json::from_str(text) {
        Ok(Word::Left { detached: true }) => Ok(PtyEvent::Detached),
        Ok(Word::Left { detached: false }) => Err(Error::Protocol("neither left nor ended".into())),
        Ok(Word::Exit { exit_code }) => Ok(PtyEvent::Exit(exit_code)),
        Ok(Word::Failed { error }) => Err(Error::Command(error)),
        Err(error) => Err(Error::Protocol(error.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::{PtyEvent, last_word};
    use crate::error::Error;

    #[test]
    fn the_last_word_is_the_exit_code_or_an_error() {
        assert!(matches!(last_word(r#"{"exit_code":3}"#), Ok(PtyEvent::Exit(3))));
        assert!(matches!(last_word(r#"{"error":"gone"}"#), Err(Error::Command(_))));
        assert!(matches!(last_word(r#"{"detached":true}"#), Ok(PtyEvent::Detached)));
        assert!(matches!(last_word("x"), Err(Error::Protocol(_))));
    }
}
