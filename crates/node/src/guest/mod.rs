//! Everything that reaches into a guest: the connection to its agent, through the gate for a new copy, and what callers
//! do over it.

mod dial;
mod download;
mod exec;
mod files;
mod gate;
pub mod link;
mod ports;
pub mod secrets;
mod trees;
mod upload;

#[cfg(test)]
mod tests;

pub use gate::{Gate, Secrets};
pub use link::{GuestLink, plain, refusal};

use crate::{daemon::Node, error::Result};
use keiki_protocol::guest::guest_client::GuestClient;
use keiki_types::SandboxId;
use tonic::{Response, Status, transport::Channel};

impl Node {
    /// One call to the guest of a sandbox, which is woken if need be.
    async fn ask<R, T, F>(
        &self,
        id: SandboxId,
        request: R,
        send: impl Fn(GuestClient<Channel>, R) -> F,
    ) -> Result<T>
    where
        R: Clone,
        F: Future<Output = Result<Response<T>, Status>>,
    {
        let using = self.inner.begin(id).await?;
        using.call(request, send).await
    }
}
