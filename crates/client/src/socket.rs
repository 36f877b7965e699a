//! WebSockets: handshake and refusals.

use crate::{
    error::{Error, Result},
    transport::{Client, refused},
};
use tokio::net::TcpStream;
use tokio_tungstenite::{
    MaybeTlsStream, WebSocketStream,
    tungstenite::{self, client::IntoClientRequest, http},
};

pub(crate) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

impl Client {
    /// Opens a WebSocket. Also returns the id of the command behind it, if there is one.
    pub(crate) async fn socket(
        &self,
        path: &str,
        query: &[(&str, String)],
    ) -> Result<(Socket, Option<String>)> {
        // Never sent: it only encodes the query.
        let get = self.request(reqwest::Method::GET, path).query(query);
        let url = get.build().map_err(Error::Transport)?.url().as_str().replacen("http", "ws", 1);
        let mut handshake = url.into_client_request().map_err(broken)?;
        if let Some(key) = &self.api_key {
            let value = http::HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| {
                Error::Protocol("the API key has characters that are not allowed in a header".into())
            })?;
            handshake.headers_mut().insert(http::header::AUTHORIZATION, value);
        }
        let (socket, answer) = tokio_tungstenite::connect_async(handshake).await.map_err(not_opened)?;
        let exec = answer.headers().get("x-keiki-exec").and_then(|id| id.to_str().ok()).map(Into::into);
        Ok((socket, exec))
    }
}

pub(crate) fn broken(error: tungstenite::Error) -> Error {
    Error::Socket(Box::new(error))
}

/// A refused handshake has the body of any other error.
fn not_opened(error: tungstenite::Error) -> Error {
    let tungstenite::Error::Http(response) = &error else { return broken(error) };
    refused(response.status().as_u16(), response.body().as_deref().unwrap_or_default(), None)
}
