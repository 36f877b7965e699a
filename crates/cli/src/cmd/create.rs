//! `keiki create`.

use super::undo::make_or_undo;
use crate::{
    context::Context,
    exit::{Failure, Outcome},
    text::{map, parse_pair, parse_secret, parse_ttl},
};
use keiki_client::{
    Client,
    api::{CreateSandbox, Sandbox, Timings, secrets::Secret},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Template to start from [default: base]
    pub template: Option<String>,
    #[command(flatten)]
    pub life: Life,
    /// vCPUs; must match the template
    #[arg(long)]
    pub cpu: Option<u64>,
    /// RAM in MiB; must match the template
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Root disk in MiB; must match the template
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u64>,
}

/// Options of every command that creates a sandbox.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Life {
    /// Delete it after this long without activity, e.g. 30m [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
    /// Hibernate it instead when the TTL expires
    #[arg(long)]
    pub persistent: bool,
    /// Label the sandbox; repeat for more
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
    /// Pass a secret, from environment variable NAME or a file, as /run/keiki/secrets/NAME
    #[arg(long = "secret", value_name = "NAME[=@FILE]", value_parser = parse_secret)]
    pub secrets: Vec<(String, Secret)>,
}

impl Life {
    pub fn request(self) -> CreateSandbox {
        CreateSandbox {
            metadata: map(self.metadata),
            ttl_seconds: self.ttl,
            persistent: self.persistent.then_some(true),
            secrets: map(self.secrets),
            ..Default::default()
        }
    }
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let request = CreateSandbox {
        template: args.template,
        cpu: args.cpu,
        memory_mb: args.memory,
        disk_mb: args.disk,
        ..args.life.request()
    };
    let sandbox = create(&context.client, request).await?;
    shown(&context, &sandbox)
}

/// Prints the id of a new sandbox, and on stderr how long it took.
pub fn shown(context: &Context, sandbox: &Sandbox) -> Outcome {
    let timings = sandbox.timings.clone().unwrap_or_default();
    let how = format!("{} in {} ms{}", sandbox.boot_mode, sandbox.boot_ms, took(&timings));
    context.out.made(sandbox, || sandbox.id.to_string(), &how)
}

/// ` (vCPU pause 1.0 ms, thaw 2.0 ms)`, with the parts that were measured.
pub fn took(timings: &Timings) -> String {
    let parts = [
        ("vCPU pause", timings.vcpu_pause_ms),
        ("user pause", timings.user_pause_ms),
        ("thaw", timings.thaw_ms),
        ("release", timings.release_ms),
    ];
    let parts: Vec<String> =
        parts.iter().filter_map(|(name, ms)| Some(format!("{name} {:.1} ms", (*ms)?))).collect();
    if parts.is_empty() { String::new() } else { format!(" ({})", parts.join(", ")) }
}

/// Creates a sandbox. If a signal arrives meanwhile, the sandbox is deleted.
pub async fn create(client: &Client, request: CreateSandbox) -> Result<Sandbox, Failure> {
    let maker = client.clone();
    let making = async move { maker.create(&request).await };
    make_or_undo(client, "creating a sandbox", making, async |client: &Client, sandbox: Sandbox| {
        client.delete(sandbox.id).await
    })
    .await
}
