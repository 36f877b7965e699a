//! `keiki create`.

use super::verb::make_or_undo;
use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    text::{parse_pair, parse_secret, parse_ttl},
};
use keiki_client::{
    Client,
    api::{CreateSandbox, Sandbox, Timings, secrets::Secret},
};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Template to start from [default: base]
    #[arg(value_name = "TEMPLATE")]
    pub template: Option<String>,
    /// How it lives.
    #[command(flatten)]
    pub life: Life,
    /// vCPUs; must be what the template was built with
    #[arg(long)]
    pub cpu: Option<u64>,
    /// RAM in MiB; must be what the template was built with
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Wanted root disk in MiB; must be the template's
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u64>,
}

/// How a new sandbox lives; `run` and `restore` have these too.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct Life {
    /// Idle time until it is removed, e.g. 30m [default: 1h]
    #[arg(long, value_name = "DURATION", value_parser = parse_ttl)]
    pub ttl: Option<i64>,
    /// Hibernate instead of remove when the TTL runs out
    #[arg(long)]
    pub persistent: bool,
    /// Label it
    #[arg(short, long, value_name = "KEY=VALUE", value_parser = parse_pair)]
    pub metadata: Vec<(String, String)>,
    /// Give it a secret: the value of the environment variable NAME, or of a file. It is `/run/keiki/secrets/NAME`
    #[arg(long = "secret", value_name = "NAME[=@FILE]", value_parser = parse_secret)]
    pub secrets: Vec<(String, Secret)>,
}

impl Life {
    /// As the API wants it.
    pub fn request(&self) -> CreateSandbox {
        CreateSandbox {
            metadata: (!self.metadata.is_empty()).then(|| self.metadata.iter().cloned().collect()),
            ttl_seconds: self.ttl,
            persistent: self.persistent.then_some(true),
            secrets: (!self.secrets.is_empty()).then(|| self.secrets.iter().cloned().collect()),
            ..Default::default()
        }
    }
}

/// Runs the command.
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

/// Prints a new sandbox's id, and says on stderr how long it took.
pub fn shown(context: &Context, sandbox: &Sandbox) -> Outcome {
    context.out.show(sandbox, || sandbox.id.to_string())?;
    if !context.out.is_json() {
        let timings = sandbox.timings.clone().unwrap_or_default();
        context.out.note(&format!("{} in {} ms{}", sandbox.boot_mode, sandbox.boot_ms, took(&timings)));
    }
    Ok(ExitCode::Success as i32)
}

/// ` (vCPU pause 1.0 ms, thaw 2.0 ms)`, of the parts that were measured.
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

/// Makes a sandbox. If a signal comes meanwhile, what was made after all is removed.
pub async fn create(client: &Client, request: CreateSandbox) -> Result<Sandbox, Failure> {
    let maker = client.clone();
    let making = async move { maker.create(&request).await };
    make_or_undo(client, "creating a sandbox", making, async |client: &Client, sandbox: Sandbox| {
        client.delete(sandbox.id).await
    })
    .await
}
