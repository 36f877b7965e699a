//! Ports in a sandbox, and browser links to them.

use crate::{error::Result, sandboxes::path, transport::Client};
use keiki_types::{
    SandboxId,
    api::{CreatePreview, Port, PortList, Preview},
};

impl Client {
    /// Listening TCP ports.
    pub async fn ports(&self, id: SandboxId) -> Result<Vec<Port>> {
        self.get::<PortList>(&path(id, "/ports")).await.map(|list| list.items)
    }

    /// Creates a browser link to a port.
    pub async fn create_preview(&self, id: SandboxId, request: &CreatePreview) -> Result<Preview> {
        self.post(&path(id, "/previews"), request).await
    }
}
