//! `keiki node`: the daemon.

use crate::{
    config::{LogFormat, NodeArgs, Resolved},
    env,
    exit::{ExitCode, Failure, Outcome, io_error},
    printer::Printer,
    signals::interrupted,
};
use keiki_node::Node;
use std::{
    io::{self, IsTerminal},
    path::Path,
    sync::Arc,
};
use tokio::net::TcpListener;
use tracing_subscriber::{Layer, filter::Targets, fmt, layer::SubscriberExt, util::SubscriberInitExt};

pub type Args = NodeArgs;

/// Prints its address on stdout once it listens; logs go to stderr.
pub async fn run(out: Printer, args: Args) -> Outcome {
    let Resolved { node: config, log_format, port_file, warnings } = args.resolve()?;
    start_log(log_format)?;
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    // Freezes and exec results hold megabytes for a moment.
    keiki_sys::heap::return_large_buffers().map_err(io_error("cannot set up the heap"))?;
    // Bind before touching anything: a second node on the same port fails at once.
    let listener = TcpListener::bind(&config.listen)
        .await
        .map_err(io_error(format!("cannot listen on {}", config.listen)))?;
    let address = listener.local_addr().map_err(io_error("cannot read the listening address"))?;
    if config.api_keys.is_empty() && !address.ip().is_loopback() {
        tracing::warn!(%address, "no API key configured, and not on loopback: requests will get 401");
    }
    let ephemeral = config.ephemeral;
    let node = Node::start(config).await.map_err(Failure::Daemon)?;
    if let Some(path) = &port_file {
        write_port(path, address.port())?;
    }
    out.line(&format!("keiki node listening on http://{address}"))?;
    let served = keiki_http::serve(Arc::new(node.clone()), listener, shutdown()).await;
    node.stop().await;
    if let Some(path) = &port_file {
        let _ = std::fs::remove_file(path);
    }
    served.map_err(io_error("cannot serve"))?;
    tracing::info!("stopped{}", if ephemeral { "" } else { "; sandboxes keep running" });
    Ok(ExitCode::Success as i32)
}

async fn shutdown() {
    let signal = interrupted().await;
    tracing::info!(signal, "stopping");
}

/// Writes the file atomically: a process that waits for it reads a whole number.
fn write_port(path: &Path, port: u16) -> Result<(), Failure> {
    let failed = || io_error(path.display().to_string());
    let mut name = path.as_os_str().to_owned();
    name.push(".new");
    std::fs::write(&name, format!("{port}\n")).map_err(failed())?;
    std::fs::rename(&name, path).map_err(failed())
}

fn start_log(format: LogFormat) -> Result<(), Failure> {
    let text = std::env::var(env::LOG).unwrap_or_else(|_| "info".into());
    // An empty directive would hide everything but errors.
    let directives: Vec<_> = text.split(',').map(str::trim).filter(|part| !part.is_empty()).collect();
    let filter = directives.join(",").parse::<Targets>();
    let filter = filter.map_err(|error| Failure::Usage(format!("{}={text:?}: {error}", env::LOG)))?;
    let log = fmt::layer().with_writer(io::stderr).with_ansi(io::stderr().is_terminal());
    let log = match format {
        LogFormat::Text => log.boxed(),
        LogFormat::Json => log.json().boxed(),
    };
    let started = tracing_subscriber::registry().with(log.with_filter(filter)).try_init();
    started.map_err(|error| Failure::Wrong(format!("cannot start the log: {error}")))
}
