//! The Rust client of `/v1`.
//!
//! ```no_run
//! # async fn example() -> keiki_client::Result<()> {
//! use keiki_client::{Client, api::{CreateSandbox, ExecRequest}};
//!
//! let client = Client::new("http://127.0.0.1:7777")?;
//! let sandbox = client.create(&CreateSandbox::default()).await?;
//! let request = ExecRequest { cmd: Some("uname -r".into()), ..Default::default() };
//! println!("{}", client.exec(sandbox.id, &request).await?.stdout);
//! client.delete(sandbox.id).await?;
//! # Ok(())
//! # }
//! ```
//!
//! - A refused request is [`Error::Api`], with the status and the node's message.
//! - A create or fork that the node refuses for now (503 or 429 with `Retry-After`: nothing was
//!   created) is retried within [`Client::with_retry_budget`]. Nothing else is ever sent twice.
//! - Only connecting has a time limit: a command or a build may take hours. Wrap a call in a
//!   timeout where you want one. To cancel a call or a stream, drop it.

mod error;
mod events;
mod exec;
mod execs;
mod files;
mod ports;
mod pty;
mod retry;
mod sandboxes;
mod snapshots;
mod socket;
mod sse;
mod tcp;
mod templates;
mod transport;

pub use error::{Error, Result};
pub use exec::{ExecEvent, ExecStream};
pub use execs::From;
pub use files::{FileReader, Unpacking};
pub use keiki_types::{EngineKind, SandboxId, Shape, SnapshotId, Status, TemplateName, api};
pub use pty::{Pty, PtyEvent, PtyInput, PtyOutput, PtyRequest};
pub use retry::Retry;
pub use sandboxes::LogStream;
pub use tcp::{Tcp, TcpInput, TcpOutput};
pub use transport::Client;
