//! Every environment variable that `keiki` reads. No other file names one.

/// Where the node is. Default `http://127.0.0.1:7777`.
pub const URL: &str = "KEIKI_URL";
/// Key sent to the node.
pub const API_KEY: &str = "KEIKI_API_KEY";
/// `keiki node`: configuration file, instead of `/etc/keiki/keiki.toml`.
pub const CONFIG: &str = "KEIKI_CONFIG";
/// `keiki node`: forces an engine, `kvm` or `qemu`.
pub const ENGINE: &str = "KEIKI_ENGINE";
/// `keiki node`: what is logged, e.g. `info` or `keiki_node=debug`.
pub const LOG: &str = "KEIKI_LOG";

/// All of them, for the help text: name, meaning.
pub const ALL: [(&str, &str); 5] = [
    (URL, "where the node is (default http://127.0.0.1:7777)"),
    (API_KEY, "key sent to the node"),
    (CONFIG, "keiki node: configuration file (default /etc/keiki/keiki.toml)"),
    (ENGINE, "keiki node: forces an engine, kvm or qemu"),
    (LOG, "keiki node: log filter (default info)"),
];
