//! `keiki kill`.

use crate::{
    context::Context,
    exit::{ExitCode, Outcome},
};
use keiki_client::api::execs::Signal;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Signal name or number
    #[arg(short, long, value_name = "SIGNAL", default_value = "TERM")]
    pub signal: String,
    /// Sandbox id
    pub sandbox: String,
    /// Command ids, from `keiki ps`
    #[arg(value_name = "EXEC", required = true)]
    pub execs: Vec<String>,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let id = context.sandbox_id(&args.sandbox).await?;
    let signal = match args.signal.parse() {
        Ok(number) => Signal::Number(number),
        Err(_) => Signal::Name(args.signal),
    };
    for exec in context.exec_ids(id, &args.execs).await? {
        context.client.signal_exec(id, &exec, signal.clone()).await?;
        if !context.out.is_json() {
            context.out.line(&exec)?;
        }
    }
    Ok(ExitCode::Success as i32)
}
