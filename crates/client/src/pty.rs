//! Commands on a terminal.

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
    pub cols: u32,
    pub rows: u32,
    /// Shell command line; the user's login shell by default.
    pub cmd: Option<String>,
    pub cwd: Option<String>,
    /// User name or `uid[:gid]`.
    pub user: Option<String>,
    /// Keep the command running if the connection is lost.
    pub keep: bool,
}

/// Output of the terminal. `Exit` or `Detached` is last.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PtyEvent {
    Output(Bytes),
    Exit(i32),
    /// Detached; the command keeps running.
    Detached,
}

/// A terminal in a sandbox. Dropping both halves kills the command, unless `keep` was set.
pub struct Pty {
    /// Id of the command, to reattach to.
    pub exec: String,
    pub input: PtyInput,
    pub output: PtyOutput,
}

/// Input to the terminal.
pub struct PtyInput(stream::SplitSink<Socket, Message>);

/// Output of the terminal.
pub struct PtyOutput(stream::SplitStream<Socket>);

impl Client {
    /// Starts a command on a new terminal.
    pub async fn pty(&self, id: SandboxId, request: &PtyRequest) -> Result<Pty> {
        let mut query = vec![("cols", request.cols.to_string()), ("rows", request.rows.to_string())];
        let texts = [("cmd", &request.cmd), ("cwd", &request.cwd), ("user", &request.user)];
        query.extend(texts.into_iter().filter_map(|(name, value)| Some((name, value.clone()?))));
        query.extend(request.keep.then(|| ("keep", "true".into())));
        let (socket, exec) = self.socket(&path(id, "/exec/pty"), &query).await?;
        Ok(Pty::new(socket, exec.unwrap_or_default()))
    }

    /// Reattaches to a command on its terminal, starting with the last `tail` bytes of output.
    /// Detaches any other client. Dropping both halves leaves the command running.
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
    pub async fn send(&mut self, bytes: Bytes) -> Result<()> {
        self.0.send(Message::Binary(bytes)).await.map_err(broken)
    }

    /// Detaches; the command keeps running.
    pub async fn detach(&mut self) -> Result<()> {
        self.0.send(Message::Text(r#"{"detach":true}"#.into())).await.map_err(broken)
    }

    /// Sends a signal to every process of the command.
    pub async fn signal(&mut self, signal: i32) -> Result<()> {
        let text = serde_json::json!({"signal": signal}).to_string();
        self.0.send(Message::Text(text.into())).await.map_err(broken)
    }

    /// Sets the size of the terminal.
    pub async fn resize(&mut self, cols: u32, rows: u32) -> Result<()> {
        let text = serde_json::json!({"resize": {"cols": cols, "rows": rows}}).to_string();
        self.0.send(Message::Text(text.into())).await.map_err(broken)
    }
}

impl PtyOutput {
    /// The next piece of output. Nothing follows the exit code.
    ///
    /// # Errors
    /// [`Error::Interrupted`] if the connection breaks off without an exit code.
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
        Detached { detached: bool },
    }
    match serde_json::from_str(text) {
        Ok(Word::Detached { detached: true }) => Ok(PtyEvent::Detached),
        Ok(Word::Detached { detached: false }) => Err(Error::Protocol("neither detached nor exited".into())),
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
