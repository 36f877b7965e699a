//! Every environment variable that `keiki` reads.

/// Address of the node.
pub const URL: &str = "KEIKI_URL";
/// API key for the node.
pub const API_KEY: &str = "KEIKI_API_KEY";
/// `keiki node`: configuration file.
pub const CONFIG: &str = "KEIKI_CONFIG";
/// `keiki node`: engine, `kvm` or `qemu`.
pub const ENGINE: &str = "KEIKI_ENGINE";
/// `keiki node`: log filter, e.g. `info` or `keiki_node=debug`.
pub const LOG: &str = "KEIKI_LOG";

/// Name and meaning of each, for the help text.
pub const ALL: [(&str, &str); 5] = [
    (URL, "address of the node (default http://127.0.0.1:7777)"),
    (API_KEY, "API key for the node"),
    (CONFIG, "keiki node: configuration file (default /etc/keiki/keiki.toml)"),
    (ENGINE, "keiki node: engine, kvm or qemu"),
    (LOG, "keiki node: log filter (default info)"),
];
