//! `keiki template`.

use super::rm::remove_all;
use crate::{
    context::Context,
    exit::{ExitCode, Failure, Outcome},
    printer::{stderr_is_terminal, table},
    progress::Progress,
    signals::unless_interrupted,
    text,
};
use futures::StreamExt;
use keiki_client::{
    TemplateName,
    api::{Build, BuildTemplate},
};
use std::{collections::VecDeque, time::Duration};
use time::OffsetDateTime;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// What to do.
    #[command(subcommand)]
    pub action: Action,
}

/// What to do.
#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// List templates
    Ls,
    /// Build a template, or join the build that runs, and show its log
    Build(BuildArgs),
    /// Bake templates again from the packages that are there, and show the log
    Rebake(Names),
    /// Remove templates; what was made from them goes on
    Rm(Names),
}

/// Arguments of build.
#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// Template
    #[arg(value_name = "NAME")]
    pub name: TemplateName,
    /// vCPUs [default: the template's own]
    #[arg(long)]
    pub cpu: Option<u64>,
    /// RAM in MiB [default: the template's own]
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Root disk in MiB [default: the template's own]
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u64>,
    /// Take newer packages, even if nothing else has changed
    #[arg(long)]
    pub force: bool,
}

/// Templates by their names.
#[derive(Debug, clap::Args)]
pub struct Names {
    /// Templates
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<TemplateName>,
}

/// Runs the command.
pub async fn run(context: Context, args: Args) -> Outcome {
    match args.action {
        Action::Ls => list(context).await,
        Action::Build(args) => {
            let request = BuildTemplate {
                name: args.name.to_string(),
                cpu: args.cpu,
                memory_mb: args.memory,
                size_mb: args.disk,
                force: args.force,
                rebake: false,
            };
            let build = build(&context, &request).await?;
            context.out.show(&build, || format!("template {} is ready", build.name))?;
            Ok(ExitCode::Success as i32)
        }
        Action::Rebake(args) => {
            for name in &args.names {
                let request =
                    BuildTemplate { name: name.to_string(), rebake: true, ..BuildTemplate::default() };
                let build = build(&context, &request).await?;
                context.out.show(&build, || format!("template {} is ready", build.name))?;
            }
            Ok(ExitCode::Success as i32)
        }
        Action::Rm(args) => {
            let client = context.client.clone();
            remove_all(&context, &args.names, move |name| {
                let client = client.clone();
                async move { client.delete_template(&name).await }
            })
            .await
        }
    }
}

async fn list(context: Context) -> Outcome {
    let templates = context.client.templates().await?;
    context.out.show(&templates, || {
        let now = OffsetDateTime::now_utc();
        let rows = templates.iter().map(|template| {
            [
                template.name.clone(),
                template.status.clone(),
                template.version.chars().take(12).collect(),
                template.cpu.to_string(),
                format!("{} MiB", template.memory_mb),
                format!("{} MiB", template.disk_mb),
                text::bytes(template.size_bytes),
                text::age(&template.created_at, now),
                template.description.clone(),
            ]
        });
        let headings = ["NAME", "STATUS", "VERSION", "CPU", "RAM", "DISK", "SIZE", "AGE", "DESCRIPTION"];
        table(headings, rows)
    })?;
    Ok(ExitCode::Success as i32)
}

/// Lines of the log told when a build fails and the log was not printed.
const TAIL: usize = 20;

/// Builds a template to its end, showing the log. A signal ends the watching, not the build.
pub async fn build(context: &Context, request: &BuildTemplate) -> Result<Build, Failure> {
    unless_interrupted(async {
        let started = context.client.build_template(request).await?;
        let progress = Progress::start(format!("building template {}", request.name));
        let mut tail = VecDeque::new();
        let mut lines = context.client.build_log(&started.id).await?;
        while let Some(line) = lines.next().await {
            // A broken log is no failed build: the record below decides.
            let Ok(line) = line else { break };
            let plain: String = line.chars().filter(|c| !c.is_control()).collect();
            progress.step(&plain);
            tail.push_back(plain);
            if tail.len() > TAIL {
                tail.pop_front();
            }
        }
        let ended = wait_for_end(context, &started.id).await?;
        if ended.status == "failed" {
            if stderr_is_terminal() {
                tail.iter().for_each(|line| progress.note(line));
            }
            return Err(Failure::Wrong(format!("building template {} failed: {}", ended.name, ended.error)));
        }
        Ok(ended)
    })
    .await
}

async fn wait_for_end(context: &Context, id: &str) -> Result<Build, Failure> {
    loop {
        let build = context.client.build(id).await?;
        if matches!(build.status.as_str(), "done" | "failed") {
            return Ok(build);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
