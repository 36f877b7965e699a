//! `keiki inspect`.

use crate::{
    context::Context,
    exit::{Failure, Outcome},
    printer::table,
};
use serde_json::Value;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Sandbox or snapshot id
    pub id: String,
}

pub async fn run(context: Context, args: Args) -> Outcome {
    let value = match sandbox(&context, &args.id).await {
        Ok(value) => value,
        Err(no_sandbox) => match snapshot(&context, &args.id).await {
            Ok(value) => value,
            Err(_) => return Err(no_sandbox),
        },
    };
    context.out.result(&value, || {
        let mut rows = Vec::new();
        flatten("", &value, &mut rows);
        table(["FIELD", "VALUE"], rows)
    })
}

async fn sandbox(context: &Context, text: &str) -> Result<Value, Failure> {
    let id = context.sandbox_id(text).await?;
    to_value(&context.client.sandbox(id).await?)
}

async fn snapshot(context: &Context, text: &str) -> Result<Value, Failure> {
    let id = context.snapshot_id(text).await?;
    to_value(&context.client.get_snapshot(id).await?)
}

fn to_value(thing: &impl serde::Serialize) -> Result<Value, Failure> {
    serde_json::to_value(thing).map_err(|error| Failure::Output(error.into()))
}

/// One row per leaf: `memory.pss_bytes  123`. Steps become `timings.steps.freeze  1.50 ms`.
fn flatten(prefix: &str, value: &Value, rows: &mut Vec<[String; 2]>) {
    let below = |key: &str| if prefix.is_empty() { key.to_owned() } else { format!("{prefix}.{key}") };
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                flatten(&below(key), value, rows);
            }
        }
        Value::Array(items) => {
            for (at, item) in items.iter().enumerate() {
                match (item["name"].as_str(), item["ms"].as_f64()) {
                    (Some(name), Some(ms)) => rows.push([below(name), format!("{ms:.2} ms")]),
                    _ => flatten(&below(&at.to_string()), item, rows),
                }
            }
        }
        Value::Null => rows.push([prefix.to_owned(), "-".into()]),
        Value::String(text) => rows.push([prefix.to_owned(), text.clone()]),
        other => rows.push([prefix.to_owned(), other.to_string()]),
    }
}

#[cfg(test)]
mod tests {
    use super::flatten;
    use serde_json::json;

    #[test]
    fn every_leaf_is_a_row() {
        let value = json!({"id": "a", "from": null, "memory": {"pss_bytes": 3},
            "timings": {"steps": [{"name": "freeze", "ms": 1.5}]}, "list": [true]});
        let mut rows = Vec::new();
        flatten("", &value, &mut rows);
        rows.sort();
        let expected = [
            ["from", "-"],
            ["id", "a"],
            ["list.0", "true"],
            ["memory.pss_bytes", "3"],
            ["timings.steps.freeze", "1.50 ms"],
        ];
        assert_eq!(rows, expected.map(|row| row.map(String::from)));
    }
}
