//! `keiki ports`.

use crate::{context::Context, exit::Outcome, printer::table, text};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox id
    pub sandbox: String,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let ports = context.client.ports(id).await?;
    context.out.result(&ports, || {
        let rows = ports.iter().map(|port| {
            let dash = || "-".to_owned();
            [
                port.port.to_string(),
                port.address.clone(),
                port.process.as_deref().map_or_else(dash, text::plain),
                port.pid.map_or_else(dash, |pid| pid.to_string()),
            ]
        });
        table(["PORT", "ADDRESS", "PROCESS", "PID"], rows)
    })
}
