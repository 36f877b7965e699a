//! `keiki-fake-node [KEY]`: serves `/v1` of a node in memory on a free port until it is stopped. The first line on standard
//! output is its address. For tests of clients.

use keiki_http::fake::FakeNode;
use std::{io::Write, sync::Arc};
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let mut out = std::io::stdout();
    writeln!(out, "http://{}", listener.local_addr()?)?;
    out.flush()?;
    let node = FakeNode::with_key(std::env::args().nth(1));
    keiki_http::serve(Arc::new(node), listener, std::future::pending::<()>()).await
}
