//! The program against a fake node: what needs a node but no guest.

use keiki_http::fake::FakeNode;
use std::{
    process::{Command, Output},
    sync::Arc,
};
use tokio::{net::TcpListener, runtime::Runtime};

const KEY: &str = "the-key";

/// A node that serves as long as it is held.
struct Node {
    url: String,
    _runtime: Runtime,
}

impl Node {
    fn start() -> Self {
        let runtime = Runtime::new().unwrap();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let node = Arc::new(FakeNode::with_key(Some(KEY.into())));
        runtime.spawn(keiki_http::serve(node, listener, std::future::pending::<()>()));
        Self { url, _runtime: runtime }
    }

    fn keiki_with(&self, key: &str, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_keiki"))
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("KEIKI_URL", &self.url)
            .env("KEIKI_API_KEY", key)
            .output()
            .unwrap()
    }

    /// Runs a command that succeeds, and gives what it printed.
    fn keiki(&self, arguments: &[&str]) -> String {
        let output = self.keiki_with(KEY, arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {}", text(&output.stderr));
        text(&output.stdout)
    }

    /// The ids of all sandboxes.
    fn listed(&self) -> Vec<String> {
        let list: serde_json::Value = serde_json::from_str(&self.keiki(&["ls", "-o", "json"])).unwrap();
        let all = list.as_array().or(list["items"].as_array()).unwrap();
        all.iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[test]
fn a_sandbox_is_created_listed_forked_and_deleted() {
    let node = Node::start();
    let id = node.keiki(&["create"]).trim().to_owned();
    assert!(node.listed().contains(&id));
    let children = node.keiki(&["fork", "-n", "3", &id]);
    assert_eq!(children.lines().count(), 3, "{children}");
    let listed = node.listed();
    assert!(children.lines().all(|child| listed.iter().any(|one| one == child)), "{listed:?}");
    node.keiki(&["rm", &id]);
    assert_eq!(node.listed().len(), listed.len() - 1);
    assert!(!node.listed().contains(&id));
}

#[test]
fn the_exit_code_of_a_command_is_ours_and_its_output_goes_through() {
    let node = Node::start();
    let id = node.keiki(&["create"]).trim().to_owned();
    assert_eq!(node.keiki(&["exec", &id, "echo", "hello"]), "hello\n");
    let output = node.keiki_with(KEY, &["exec", &id, "exit", "7"]);
    assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
}

#[test]
fn refusals_end_with_125_and_the_sentence_of_the_node() {
    let node = Node::start();
    for (key, arguments, named) in [
        ("wrong", &["ls"][..], "API key"),
        (KEY, &["create", "nowhere"], "no template nowhere"),
        (KEY, &["rm", "0190b7a0-0000-7000-8000-000000000009"], "no sandbox"),
        (KEY, &["snapshot", "0190b7a0-0000-7000-8000-000000000001"], "a snapshot needs 300 MiB"),
    ] {
        let output = node.keiki_with(key, arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}: {said}");
        assert!(said.contains(named), "{arguments:?}: {said}");
    }
}
