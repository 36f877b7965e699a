//! Configuration of `keiki node`: flags, file and defaults, in this order.
//!
//! [`Settings`] is one layer: every setting is a flag (or its variable), a key of the file and a
//! key of `default-config.toml`, the one place that holds defaults. [`Resolved`] is what the node
//! starts with.

use crate::{
    env,
    exit::{Failure, io_error},
    text::{one_of, parse_duration},
};
use keiki_client::EngineKind;
use keiki_node::Sharing;
use serde::Deserialize;
use std::{
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

const DEFAULTS: &str = include_str!("../default-config.toml");
const SYSTEM_FILE: &str = "/etc/keiki/keiki.toml";
const GUEST: &str = "keiki-guest";
/// The monitor of engine `kvm`.
pub const VMM: &str = "keiki-vmm";

/// Arguments of `keiki node`.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NodeArgs {
    /// Configuration file [default: /etc/keiki/keiki.toml, if it exists]
    #[arg(long, value_name = "FILE", env = env::CONFIG)]
    pub config: Option<PathBuf>,
    #[allow(missing_docs)] // A doc comment would become the command's help.
    #[command(flatten)]
    pub settings: Settings,
    /// Write the port to this file once the node is listening
    #[arg(long, value_name = "FILE")]
    pub port_file: Option<PathBuf>,
}

macro_rules! settings {
    ($($(#[$attribute:meta])* $name:ident: $type:ty,)*) => {
        #[allow(missing_docs)] // A doc comment would become the command's help.
        #[derive(Debug, Clone, Default, PartialEq, Eq, clap::Args, Deserialize)]
        #[serde(deny_unknown_fields, default)]
        pub struct Settings {
            $($(#[$attribute])* pub $name: Option<$type>,)*
        }

        impl Settings {
            #[cfg(test)]
            const KEYS: &[&str] = &[$(stringify!($name)),*];

            /// The settings of this layer, and those of `below` where this one sets none.
            fn or(self, below: Self) -> Self {
                Self { $($name: self.$name.or(below.$name),)* }
            }
        }
    };
}

settings! {
    /// Directory for everything durable [default: /var/lib/keiki]
    #[arg(long, value_name = "DIR")]
    data_dir: PathBuf,
    /// Directory for sockets; keep the path short [default: /run/keiki]
    #[arg(long, value_name = "DIR")]
    run_dir: PathBuf,
    /// Address to serve the API on; port 0 picks a free port [default: 127.0.0.1:7777]
    #[arg(long, value_name = "ADDRESS")]
    listen: String,
    /// File of API keys, one per line
    #[arg(long, value_name = "FILE")]
    api_key_file: PathBuf,
    /// Engine that runs the machines [default: the best one that works here]
    #[arg(long, value_parser = one_of::<EngineKind, 2>(ENGINES), env = env::ENGINE)]
    engine: EngineKind,
    /// Network to take the sandboxes' outside addresses from [default: 10.200.0.0/16]
    #[arg(long, value_name = "NETWORK")]
    slot_range: String,
    /// Guest agent binary [default: in ../lib/keiki or next to this program]
    #[arg(long, value_name = "FILE")]
    guest_binary: PathBuf,
    /// keiki-vmm, the monitor of engine kvm [default: in ../lib/keiki or next to this program]
    #[arg(long, value_name = "FILE")]
    vmm_binary: PathBuf,
    /// Widest scope in which sandboxes share memory until they write to it [default: node]
    #[arg(long, value_parser = one_of::<Sharing, 3>(SCOPES))]
    sharing_scope: Sharing,
    /// Directory for kernels and root disks built from packages [default: in the data directory]
    #[arg(long, value_name = "DIR")]
    cache_dir: PathBuf,
    /// Directory of your own templates, one NAME.toml each [default: /etc/keiki/templates]
    #[arg(long, value_name = "DIR")]
    templates_dir: PathBuf,
    /// Size of the store's file system, if the node has to make one [default: half of the free
    /// space, 4 to 64]
    #[arg(long, value_name = "GIB")]
    store_gib: u64,
    /// RAM that all sandboxes together may use [default: 90% of the host's]
    #[arg(long, value_name = "MIB")]
    memory_limit_mib: u64,
    /// VMs to prepare for each template ahead of time [default: 2]
    #[arg(long, value_name = "N")]
    prepared_vms: usize,
    #[arg(long, hide = true)]
    seats_ahead: usize,
    /// Private network that sandboxes may reach, as a CIDR; repeat for more
    #[arg(long, value_name = "NETWORK")]
    egress_allow: Vec<String>,
    /// Domain for previews; all its names must resolve to this node [default: localhost]
    #[arg(long, value_name = "DOMAIN")]
    preview_suffix: String,
    /// Upstream name server, e.g. 192.0.2.53:53; repeat for more [default: the host's]
    #[arg(long, value_name = "ADDRESS")]
    dns: Vec<SocketAddr>,
    /// Mark snapshots older than this as stale, e.g. 30d [default: never]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    #[serde(deserialize_with = "age")]
    snapshot_max_age: Duration,
    /// Refuse to restore snapshots older than this, e.g. 90d [default: never]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    #[serde(deserialize_with = "age")]
    snapshot_refuse_age: Duration,
    /// Delete all sandboxes and unmount the store when the node stops
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    ephemeral: bool,
    /// Log format [default: text]
    #[arg(long, value_enum)]
    log_format: LogFormat,
}

const ENGINES: [(&str, &str); 2] =
    [("kvm", "Keiki's own monitor, on KVM"), ("qemu", "QEMU, emulated in software")];
const SCOPES: [(&str, &str); 3] = [
    ("node", "One template's sandboxes across the node, one snapshot's within a workspace"),
    ("workspace", "Sandboxes within a workspace"),
    ("none", "Every sandbox has its own copy"),
];

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines of text
    Text,
    /// One JSON object per line
    Json,
}

/// What the node starts with.
#[derive(Debug)]
pub struct Resolved {
    /// The node's own part.
    pub node: keiki_node::Config,
    /// How the log is written.
    pub log_format: LogFormat,
    /// Where the port goes.
    pub port_file: Option<PathBuf>,
    /// Old names in use: for the log.
    pub warnings: Vec<String>,
}

impl NodeArgs {
    /// Reads the files and decides.
    pub fn resolve(self) -> Result<Resolved, Failure> {
        let file = read_file(self.config.as_deref())?;
        let exe = std::env::current_exe().map_err(io_error("finding this program"))?;
        self.decide(file, &exe)
    }

    fn decide(self, file: Settings, exe: &Path) -> Result<Resolved, Failure> {
        let mut warnings = Vec::new();
        let [typed, file] = [(self.settings, "--seats-ahead"), (file, "seats_ahead")]
            .map(|(layer, old)| layer.renamed(old, &mut warnings));
        let set = typed.or(file).or(parse(DEFAULTS, "the built-in defaults")?);
        let node = keiki_node::Config {
            data_dir: need("data_dir", set.data_dir)?,
            run_dir: need("run_dir", set.run_dir)?,
            listen: need("listen", set.listen)?,
            api_keys: set.api_key_file.as_deref().map(read_keys).transpose()?.unwrap_or_default(),
            engine: set.engine,
            vmm_binary: set.vmm_binary.or_else(|| find(exe, VMM).ok()),
            sharing: need("sharing_scope", set.sharing_scope)?,
            slot_range: need("slot_range", set.slot_range)?,
            guest_binary: set.guest_binary.map_or_else(|| find_guest(exe), Ok)?,
            cache_dir: set.cache_dir,
            templates_dir: set.templates_dir,
            store_gib: set.store_gib,
            memory_limit_mib: set.memory_limit_mib,
            seats_ahead: need("prepared_vms", set.prepared_vms)?,
            egress_allow: set.egress_allow.unwrap_or_default(),
            preview_suffix: need("preview_suffix", set.preview_suffix)?,
            dns: set.dns.unwrap_or_default(),
            snapshot_max_age: set.snapshot_max_age,
            snapshot_refuse_age: set.snapshot_refuse_age,
            ephemeral: set.ephemeral.unwrap_or_default(),
        };
        let log_format = need("log_format", set.log_format)?;
        Ok(Resolved { node, log_format, port_file: self.port_file, warnings })
    }
}

impl Settings {
    /// Takes a setting's old name for its new one.
    fn renamed(mut self, old: &str, warnings: &mut Vec<String>) -> Self {
        if let Some(count) = self.seats_ahead.take() {
            let new = old.replace("seats-ahead", "prepared-vms").replace("seats_ahead", "prepared_vms");
            warnings.push(format!("{old} is deprecated: use {new}"));
            self.prepared_vms.get_or_insert(count);
        }
        self
    }
}

fn need<T>(name: &str, value: Option<T>) -> Result<T, Failure> {
    value.ok_or_else(|| Failure::Usage(format!("{name} is not set: pass --{}", name.replace('_', "-"))))
}

/// An age in the file is written as on the command line.
fn age<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(value)?;
    parse_duration(&text).map(Some).map_err(serde::de::Error::custom)
}

/// Only the system's own file may be missing.
fn read_file(named: Option<&Path>) -> Result<Settings, Failure> {
    let path = named.unwrap_or(Path::new(SYSTEM_FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, &path.display().to_string()),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(Settings::default()),
        Err(error) => Err(io_error(path.display().to_string())(error)),
    }
}

fn parse(text: &str, origin: &str) -> Result<Settings, Failure> {
    toml::from_str(text).map_err(|error| Failure::Usage(format!("{origin}: {error}")))
}

/// One key per line, without blank lines and lines that start with `#`.
fn read_keys(path: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(path).map_err(io_error(path.display().to_string()))?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(String::from).collect();
    if keys.is_empty() {
        // Naming a file means: require a key.
        return Err(Failure::Usage(format!("no API key in {}", path.display())));
    }
    Ok(keys)
}

fn find_guest(exe: &Path) -> Result<PathBuf, Failure> {
    find(exe, GUEST).map_err(|[lib, beside]| {
        Failure::Usage(format!("guest agent not found at {lib} or {beside}: pass --guest-binary"))
    })
}

/// One of our programs: where an installation has it, or next to this one. An error lists the
/// places searched.
pub fn find(exe: &Path, name: &str) -> Result<PathBuf, [String; 2]> {
    let dir = exe.parent().unwrap_or(Path::new("/"));
    let places = [dir.join("../lib/keiki").join(name), dir.join(name)];
    let found = places.iter().find(|path| path.is_file());
    found.cloned().ok_or_else(|| places.map(|path| path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::{DEFAULTS, LogFormat, NodeArgs, Settings, parse, read_file, read_keys};
    use clap::{Args, Command, FromArgMatches};
    use keiki_client::EngineKind;
    use std::{fs, path::PathBuf, time::Duration};

    #[test]
    fn the_commented_defaults_are_whole_and_true() {
        let defaults = parse(DEFAULTS, "defaults").unwrap();
        assert_eq!(defaults.data_dir, Some("/var/lib/keiki".into()));
        assert_eq!(defaults.listen.as_deref(), Some("127.0.0.1:7777"));
        assert_eq!(defaults.log_format, Some(LogFormat::Text));
        // Every key is in the file, set or commented out, and a commented one may be taken as it
        // is.
        let uncommented: Vec<&str> =
            DEFAULTS.lines().map(|line| line.strip_prefix("#: ").unwrap_or(line)).collect();
        for key in Settings::KEYS.iter().filter(|key| **key != "seats_ahead") {
            assert!(uncommented.iter().any(|line| line.starts_with(&format!("{key} ="))), "{key}");
        }
        let all = parse(&uncommented.join("\n"), "uncommented").unwrap();
        assert!(all.engine.is_some() && all.guest_binary.is_some() && all.api_key_file.is_some());
    }

    fn typed(args: &[&str]) -> NodeArgs {
        let command = NodeArgs::augment_args(Command::new("node"));
        NodeArgs::from_arg_matches(&command.get_matches_from([&["node"], args].concat())).unwrap()
    }

    fn install(dir: &std::path::Path) -> PathBuf {
        fs::create_dir_all(dir.join("bin")).unwrap();
        fs::create_dir_all(dir.join("lib/keiki")).unwrap();
        fs::write(dir.join("bin/keiki-guest"), "").unwrap();
        dir.join("bin/keiki")
    }

    #[test]
    fn flags_beat_the_file_and_the_file_beats_defaults() {
        let dir = tempfile::tempdir().unwrap();
        let exe = install(dir.path());
        let file = parse("data_dir = '/f'\nlisten = '127.0.0.1:1'\nengine = 'kvm'", "test").unwrap();
        let (listen, log_format) = (Some("127.0.0.1:0".into()), Some(LogFormat::Json));
        let settings = Settings { listen, log_format, ..Default::default() };
        let args = NodeArgs { settings, ..Default::default() };
        let resolved = args.decide(file, &exe).unwrap();
        assert_eq!(resolved.node.data_dir, PathBuf::from("/f"));
        assert_eq!(resolved.node.listen, "127.0.0.1:0");
        assert_eq!(resolved.node.run_dir, PathBuf::from("/run/keiki"));
        assert_eq!(resolved.node.engine, Some(EngineKind::Kvm));
        assert_eq!(resolved.log_format, LogFormat::Json);
        assert!(resolved.node.api_keys.is_empty());
        assert!(resolved.warnings.is_empty());
        let file = Settings { engine: Some(EngineKind::Kvm), ephemeral: Some(true), ..Default::default() };
        let resolved = typed(&["--engine", "qemu", "--ephemeral=false"]).decide(file, &exe).unwrap();
        assert_eq!((resolved.node.engine, resolved.node.ephemeral), (Some(EngineKind::Qemu), false));
        assert!(typed(&["--ephemeral"]).decide(Settings::default(), &exe).unwrap().node.ephemeral);
    }

    #[test]
    fn an_old_name_works_and_warns() {
        let dir = tempfile::tempdir().unwrap();
        let exe = install(dir.path());
        let resolve = |args: &[&str], text: &str| {
            let resolved = typed(args).decide(parse(text, "test").unwrap(), &exe).unwrap();
            (resolved.node.seats_ahead, resolved.warnings)
        };
        let flag = "--seats-ahead is deprecated: use --prepared-vms".to_owned();
        let key = "seats_ahead is deprecated: use prepared_vms".to_owned();
        assert_eq!(resolve(&["--prepared-vms", "7"], ""), (7, vec![]));
        assert_eq!(resolve(&["--seats-ahead", "7"], "prepared_vms = 5"), (7, vec![flag]));
        assert_eq!(resolve(&[], "seats_ahead = 5"), (5, vec![key.clone()]));
        assert_eq!(resolve(&[], "seats_ahead = 5\nprepared_vms = 6"), (6, vec![key]));
    }

    #[test]
    fn the_guest_is_found_in_lib_first_then_beside() {
        let dir = tempfile::tempdir().unwrap();
        let exe = install(dir.path());
        let found = |exe| {
            NodeArgs::default().decide(Settings::default(), exe).map(|resolved| resolved.node.guest_binary)
        };
        assert_eq!(found(&exe).unwrap(), dir.path().join("bin/keiki-guest"));
        fs::write(dir.path().join("lib/keiki/keiki-guest"), "").unwrap();
        assert_eq!(found(&exe).unwrap(), dir.path().join("bin/../lib/keiki/keiki-guest"));
        assert!(
            found(&dir.path().join("other/bin/keiki")).unwrap_err().to_string().contains("--guest-binary")
        );
    }

    #[test]
    fn mistakes_are_reported() {
        let error = parse("datadir = '/x'", "my.toml").unwrap_err().to_string();
        assert!(error.contains("my.toml") && error.contains("datadir"), "{error}");
        assert!(parse("engine = 'xen'", "t").is_err());
        let error = parse("snapshot_max_age = 'a month'", "t").unwrap_err().to_string();
        assert!(error.contains("is not a duration"), "{error}");
        let ages = parse("snapshot_max_age = '30d'", "t").unwrap();
        assert_eq!(ages.snapshot_max_age, Some(Duration::from_secs(30 * 86_400)));
        let dir = tempfile::tempdir().unwrap();
        assert!(read_file(Some(&dir.path().join("none.toml"))).is_err());
        let keys = dir.path().join("keys");
        fs::write(&keys, "# only a comment\n\n").unwrap();
        assert!(read_keys(&keys).is_err());
        fs::write(&keys, "# ours\n a \nb\n").unwrap();
        assert_eq!(read_keys(&keys).unwrap(), ["a", "b"]);
    }
}
