//! Listening ports in a sandbox.

use crate::{
    daemon::Node,
    error::{Error, Result},
    guest::{dial, plain, refusal},
};
use async_trait::async_trait;
use keiki_api::{Dialed, Ports};
use keiki_protocol::guest::{ListPortsRequest, ListeningPort};
use keiki_types::{SandboxId, api::Port};
use tonic::Code;

/// More than a guest has any reason to report.
const MOST: usize = 1024;

#[async_trait]
impl Ports for Node {
    async fn ports(&self, id: SandboxId) -> Result<Vec<Port>> {
        let using = self.inner.begin(id).await?;
        let request = ListPortsRequest {};
        let found = using
            .live
            .guest
            .call(request, |mut guest, request| async move { guest.list_ports(request).await });
        match found.await {
            Ok(reply) => {
                let mut ports: Vec<Port> = reply.ports.into_iter().take(MOST).filter_map(port).collect();
                ports.sort_by(|a, b| (a.port, &a.address).cmp(&(b.port, &b.address)));
                Ok(ports)
            }
            Err(status) if status.code() == Code::Unimplemented => Err(Error::Conflict(
                "the agent in this sandbox has an older version and cannot list ports; connections to ports still work"
                    .into(),
            )),
            Err(status) => Err(using.explain(refusal(&status)).await),
        }
    }

    async fn dial(&self, id: SandboxId, port: u16) -> Result<Dialed> {
        if port == 0 {
            return Err(Error::Invalid("port must be from 1 to 65535, not 0".into()));
        }
        dial::dial(self.inner.begin(id).await?, port).await
    }
}

/// A port that a guest reports; None if it is nonsense.
fn port(said: ListeningPort) -> Option<Port> {
    let port = u16::try_from(said.port).ok().filter(|&port| port > 0)?;
    let address: std::net::IpAddr = said.address.parse().ok()?;
    let process = (!said.process.is_empty()).then(|| plain(&said.process));
    Some(Port { port, address: address.to_string(), pid: (said.pid > 0).then_some(said.pid), process })
}

#[cfg(test)]
mod tests {
    use super::port;
    use keiki_protocol::guest::ListeningPort;

    #[test]
    fn nonsense_of_a_guest_is_nothing() {
        let said = |port, address: &str| ListeningPort {
            port,
            address: address.into(),
            pid: 0,
            process: "a\u{1b}b".into(),
        };
        assert!(port(said(0, "::")).is_none());
        assert!(port(said(65_536, "::")).is_none());
        assert!(port(said(80, "<script>")).is_none());
        let good = port(said(80, "::"));
        assert_eq!(good.and_then(|port| port.process).as_deref(), Some("a b"));
    }
}
