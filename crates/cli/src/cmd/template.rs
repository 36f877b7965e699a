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

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    pub action: Action,
}

#[derive(Debug, clap::Subcommand)]
pub enum Action {
    /// List templates
    Ls,
    /// Build a template and show its log; joins a running build
    Build(BuildArgs),
    /// Rebuild templates from the packages already downloaded, and show the log
    Rebake(Names),
    /// Delete templates; sandboxes created from them keep running
    Rm(Names),
}

#[derive(Debug, clap::Args)]
pub struct BuildArgs {
    /// Template name
    pub name: TemplateName,
    /// vCPUs [default: the template's]
    #[arg(long)]
    pub cpu: Option<u64>,
    /// RAM in MiB [default: the template's]
    #[arg(long, value_name = "MIB")]
    pub memory: Option<u64>,
    /// Root disk in MiB [default: the template's]
    #[arg(long, value_name = "MIB")]
    pub disk: Option<u64>,
    /// Fetch the latest packages and rebuild, even if nothing changed
    #[arg(long)]
    pub force: bool,
}

#[derive(Debug, clap::Args)]
pub struct Names {
    /// Template names
    #[arg(value_name = "NAME", required = true)]
    pub names: Vec<TemplateName>,
}

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
            build_and_show(&context, &request).await
        }
        Action::Rebake(args) => {
            for name in &args.names {
                let request =
                    BuildTemplate { name: name.to_string(), rebake: true, ..BuildTemplate::default() };
                build_and_show(&context, &request).await?;
            }
            Ok(ExitCode::Success as i32)
        }
        Action::Rm(args) => {
            remove_all(&context, &args.names, async |client, name| client.delete_template(name).await).await
        }
    }
}

async fn list(context: Context) -> Outcome {
    let templates = context.client.templates().await?;
    context.out.result(&templates, || {
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
    })
}

/// Log lines to print when a build fails and its log was not shown.
const TAIL: usize = 20;

async fn build_and_show(context: &Context, request: &BuildTemplate) -> Outcome {
    let build = build(context, request).await?;
    context.out.result(&build, || format!("template {} is ready", build.name))
}

/// Builds a template and shows the log until it ends. A signal stops watching, not the build.
pub async fn build(context: &Context, request: &BuildTemplate) -> Result<Build, Failure> {
    unless_interrupted(async {
        let started = context.client.build_template(request).await?;
        let progress = Progress::start(format!("building template {}", request.name));
        let mut tail = VecDeque::new();
        let mut lines = context.client.build_log(&started.id).await?;
        while let Some(line) = lines.next().await {
            // Losing the log does not fail the build: its record decides.
            let Ok(line) = line else { break };
            let plain = text::plain(&line);
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
            return Err(Failure::Wrong(format!("failed to build template {}: {}", ended.name, ended.error)));
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
