//! Ports of a sandbox, and links to them.

use crate::{error::Result, sandboxes::path, transport::Client};
use keiki_types::{
    SandboxId,
    api::{CreatePreview, Port, PortList, Preview},
};

#[allow(clippy::missing_errors_doc)] // Each fails as `Error` says.
impl Client {
    /// TCP ports that something in the sandbox listens on.
    pub async fn ports(&self, id: SandboxId) -> Result<Vec<Port>> {
        self.get::<PortList>(&path(id, "/ports")).await.map(|list| list.items)
    }

    /// A link to a port, for a browser.
    pub async fn create_preview(&self, id: SandboxId, request: &CreatePreview) -> Result<Preview> {
        self.post(&path(id, "/previews"), request).await
    }
}
