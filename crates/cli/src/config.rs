//! Configuration of `keiki node`: what was typed, what the file says, and what comes of it.
//!
//! Three types, so that no default can be mistaken for a wish: [`NodeArgs`] is what the user typed, [`File`]
//! what a TOML file says, and [`Resolved`] what the node is started with. A flag (or its variable) beats the
//! file, the file beats `default-config.toml`, which is the one place where defaults are written.

use crate::{env, exit::Failure, text::parse_duration};
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

/// What the user typed.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct NodeArgs {
    /// Configuration file [default: /etc/keiki/keiki.toml, if it is there]
    #[arg(long, value_name = "FILE", env = env::CONFIG)]
    pub config: Option<PathBuf>,
    /// Where everything durable lives [default: /var/lib/keiki]
    #[arg(long, value_name = "DIR")]
    pub data_dir: Option<PathBuf>,
    /// Where sockets live; keep it short [default: /run/keiki]
    #[arg(long, value_name = "DIR")]
    pub run_dir: Option<PathBuf>,
    /// Address of the API; port 0 picks a free one [default: 127.0.0.1:7777]
    #[arg(long, value_name = "ADDRESS")]
    pub listen: Option<String>,
    /// File with the keys that may use the API, one a line
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// What runs the machines [default: what works here]
    #[arg(long, value_enum, env = env::ENGINE)]
    pub engine: Option<Engine>,
    /// Network that sandboxes get their outside addresses from [default: 10.200.0.0/16]
    #[arg(long, value_name = "NETWORK")]
    pub slot_range: Option<String>,
    /// The guest agent's binary [default: beside this program or in ../lib/keiki]
    #[arg(long, value_name = "FILE")]
    pub guest_binary: Option<PathBuf>,
    /// The monitor of engine kvm, keiki-vmm [default: beside this program or in ../lib/keiki]
    #[arg(long, value_name = "FILE")]
    pub vmm_binary: Option<PathBuf>,
    /// Among whom sandboxes share memory at most until they write it [default: node]
    #[arg(long, value_enum)]
    pub sharing_scope: Option<Scope>,
    /// Where kernels and root disks made from packages are kept [default: in the data directory]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Where templates of your own are, NAME.toml each [default: /etc/keiki/templates]
    #[arg(long, value_name = "DIR")]
    pub templates_dir: Option<PathBuf>,
    /// Size of the store's own file system, where one has to be made [default: half of what is free, 4 to 64]
    #[arg(long, value_name = "GIB")]
    pub store_gib: Option<u64>,
    /// RAM that sandboxes may use together [default: nine tenths of the host's]
    #[arg(long, value_name = "MIB")]
    pub memory_limit_mib: Option<u64>,
    /// Monitors started ahead for each template [default: 2]
    #[arg(long, value_name = "N")]
    pub seats_ahead: Option<usize>,
    /// Private network that sandboxes may reach, as a CIDR; may be given several times
    #[arg(long, value_name = "NETWORK")]
    pub egress_allow: Vec<String>,
    /// Domain of previews, whose names lead to this node [default: localhost]
    #[arg(long, value_name = "DOMAIN")]
    pub preview_suffix: Option<String>,
    /// Name server behind the sandboxes' own, e.g. 192.0.2.53:53; may be given several times [default: the host's]
    #[arg(long, value_name = "ADDRESS")]
    pub dns: Vec<SocketAddr>,
    /// Mark snapshots older than this as stale, e.g. 30d [default: none]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    pub snapshot_max_age: Option<Duration>,
    /// Do not restore snapshots older than this, e.g. 90d [default: restore all]
    #[arg(long, value_name = "AGE", value_parser = parse_duration)]
    pub snapshot_refuse_age: Option<Duration>,
    /// End all sandboxes and unmount the store when the node stops
    #[arg(long)]
    pub ephemeral: bool,
    /// How the log is written [default: text]
    #[arg(long, value_enum)]
    pub log_format: Option<LogFormat>,
    /// Write the port into this file once the node listens
    #[arg(long, value_name = "FILE")]
    pub port_file: Option<PathBuf>,
}

/// An engine, as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// The own monitor, on KVM
    Kvm,
    /// QEMU, software emulation
    Qemu,
}

/// Among whom memory is shared, as typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Sandboxes of one template on the whole node, of one snapshot within its workspace
    Node,
    /// Only within a workspace
    Workspace,
    /// Each sandbox has its own copy
    None,
}

/// How the log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
    Json,
}

/// What a file says. The same keys as the flags.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct File {
    data_dir: Option<PathBuf>,
    run_dir: Option<PathBuf>,
    listen: Option<String>,
    api_key_file: Option<PathBuf>,
    engine: Option<Engine>,
    slot_range: Option<String>,
    guest_binary: Option<PathBuf>,
    vmm_binary: Option<PathBuf>,
    sharing_scope: Option<Scope>,
    cache_dir: Option<PathBuf>,
    templates_dir: Option<PathBuf>,
    store_gib: Option<u64>,
    memory_limit_mib: Option<u64>,
    seats_ahead: Option<usize>,
    egress_allow: Option<Vec<String>>,
    preview_suffix: Option<String>,
    dns: Option<Vec<SocketAddr>>,
    #[serde(deserialize_with = "age")]
    snapshot_max_age: Option<Duration>,
    #[serde(deserialize_with = "age")]
    snapshot_refuse_age: Option<Duration>,
    ephemeral: Option<bool>,
    log_format: Option<LogFormat>,
}

/// What the node is started with.
#[derive(Debug)]
pub struct Resolved {
    /// The node's own part.
    pub node: keiki_node::Config,
    /// How the log is written.
    pub log_format: LogFormat,
    /// Where the port goes.
    pub port_file: Option<PathBuf>,
}

impl NodeArgs {
    /// Reads the files and decides.
    pub fn resolve(self) -> Result<Resolved, Failure> {
        let file = read_file(self.config.as_deref())?;
        let exe = std::env::current_exe()
            .map_err(|source| Failure::Io { what: "asking where this program is".into(), source })?;
        self.decide(file, &exe)
    }

    fn decide(self, file: File, exe: &Path) -> Result<Resolved, Failure> {
        let defaults = parse(DEFAULTS, "the built-in defaults")?;
        fn need<T>(name: &str, typed: Option<T>, file: Option<T>, default: Option<T>) -> Result<T, Failure> {
            let value = typed.or(file).or(default);
            value.ok_or_else(|| {
                Failure::Usage(format!("{name} is set nowhere: give --{}", name.replace('_', "-")))
            })
        }
        let api_keys = match self.api_key_file.or(file.api_key_file).or(defaults.api_key_file) {
            Some(path) => read_keys(&path)?,
            None => Vec::new(),
        };
        let guest_binary = match self.guest_binary.or(file.guest_binary).or(defaults.guest_binary) {
            Some(path) => path,
            None => find(exe, GUEST).map_err(|[lib, beside]| {
                Failure::Usage(format!(
                    "the guest agent is neither {lib} nor {beside}: say where with --guest-binary"
                ))
            })?,
        };
        let vmm_binary = self.vmm_binary.or(file.vmm_binary).or(defaults.vmm_binary).or(find(exe, VMM).ok());
        let sharing = need("sharing_scope", self.sharing_scope, file.sharing_scope, defaults.sharing_scope)?;
        let node = keiki_node::Config {
            data_dir: need("data_dir", self.data_dir, file.data_dir, defaults.data_dir)?,
            run_dir: need("run_dir", self.run_dir, file.run_dir, defaults.run_dir)?,
            listen: need("listen", self.listen, file.listen, defaults.listen)?,
            api_keys,
            engine: self.engine.or(file.engine).or(defaults.engine).map(|engine| match engine {
                Engine::Kvm => EngineKind::Kvm,
                Engine::Qemu => EngineKind::Qemu,
            }),
            vmm_binary,
            sharing: match sharing {
                Scope::Node => Sharing::Node,
                Scope::Workspace => Sharing::Workspace,
                Scope::None => Sharing::None,
            },
            slot_range: need("slot_range", self.slot_range, file.slot_range, defaults.slot_range)?,
            guest_binary,
            cache_dir: self.cache_dir.or(file.cache_dir).or(defaults.cache_dir),
            templates_dir: self.templates_dir.or(file.templates_dir).or(defaults.templates_dir),
            store_gib: self.store_gib.or(file.store_gib).or(defaults.store_gib),
            memory_limit_mib: self.memory_limit_mib.or(file.memory_limit_mib).or(defaults.memory_limit_mib),
            seats_ahead: need("seats_ahead", self.seats_ahead, file.seats_ahead, defaults.seats_ahead)?,
            egress_allow: listed(self.egress_allow, file.egress_allow, defaults.egress_allow),
            preview_suffix: need(
                "preview_suffix",
                self.preview_suffix,
                file.preview_suffix,
                defaults.preview_suffix,
            )?,
            dns: listed(self.dns, file.dns, defaults.dns),
            snapshot_max_age: self.snapshot_max_age.or(file.snapshot_max_age).or(defaults.snapshot_max_age),
            snapshot_refuse_age: self
                .snapshot_refuse_age
                .or(file.snapshot_refuse_age)
                .or(defaults.snapshot_refuse_age),
            ephemeral: self.ephemeral || file.ephemeral.or(defaults.ephemeral).unwrap_or(false),
        };
        let log_format = need("log_format", self.log_format, file.log_format, defaults.log_format)?;
        Ok(Resolved { node, log_format, port_file: self.port_file })
    }
}

/// A list that was typed replaces the file's.
fn listed<T>(typed: Vec<T>, file: Option<Vec<T>>, default: Option<Vec<T>>) -> Vec<T> {
    if typed.is_empty() { file.or(default).unwrap_or_default() } else { typed }
}

/// An age as it is typed, too.
fn age<'de, D: serde::Deserializer<'de>>(value: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(value)?;
    parse_duration(&text).map(Some).map_err(serde::de::Error::custom)
}

/// The named file must be there; the system's may be.
fn read_file(named: Option<&Path>) -> Result<File, Failure> {
    let path = named.unwrap_or(Path::new(SYSTEM_FILE));
    match std::fs::read_to_string(path) {
        Ok(text) => parse(&text, &path.display().to_string()),
        Err(error) if named.is_none() && error.kind() == io::ErrorKind::NotFound => Ok(File::default()),
        Err(source) => Err(Failure::Io { what: path.display().to_string(), source }),
    }
}

fn parse(text: &str, whence: &str) -> Result<File, Failure> {
    toml::from_str(text).map_err(|error| Failure::Usage(format!("{whence}: {error}")))
}

/// One key a line; blank lines and lines that start with `#` are nothing.
fn read_keys(path: &Path) -> Result<Vec<String>, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Failure::Io { what: path.display().to_string(), source })?;
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let keys: Vec<String> = lines.map(String::from).collect();
    if keys.is_empty() {
        // Whoever names a file wants keys to be asked for.
        return Err(Failure::Usage(format!("{} holds no key", path.display())));
    }
    Ok(keys)
}

/// One of our programs: where an installation has it, or beside this one. Otherwise where it was looked for.
pub fn find(exe: &Path, name: &str) -> Result<PathBuf, [String; 2]> {
    let dir = exe.parent().unwrap_or(Path::new("/"));
    let places = [dir.join("../lib/keiki").join(name), dir.join(name)];
    let found = places.iter().find(|path| path.is_file());
    found.cloned().ok_or_else(|| places.map(|path| path.display().to_string()))
}

#[cfg(test)]
mod tests {
    use super::{DEFAULTS, Engine, File, LogFormat, NodeArgs, parse, read_file, read_keys};
    use keiki_client::EngineKind;
    use std::{fs, path::PathBuf, time::Duration};

    #[test]
    fn the_commented_defaults_are_whole_and_true() {
        let defaults = parse(DEFAULTS, "defaults").unwrap();
        assert_eq!(defaults.data_dir, Some("/var/lib/keiki".into()));
        assert_eq!(defaults.listen.as_deref(), Some("127.0.0.1:7777"));
        assert_eq!(defaults.log_format, Some(LogFormat::Text));
        // Every key is in the file, set or commented out, and a commented one may be taken as it is.
        let keys = "data_dir run_dir listen api_key_file engine slot_range guest_binary vmm_binary sharing_scope log_format cache_dir store_gib \
                    templates_dir memory_limit_mib seats_ahead egress_allow preview_suffix dns snapshot_max_age snapshot_refuse_age ephemeral";
        let uncommented: Vec<&str> =
            DEFAULTS.lines().map(|line| line.strip_prefix("#: ").unwrap_or(line)).collect();
        for key in keys.split(' ') {
            assert!(uncommented.iter().any(|line| line.starts_with(&format!("{key} ="))), "{key}");
        }
        let all = parse(&uncommented.join("\n"), "uncommented").unwrap();
        assert!(all.engine.is_some() && all.guest_binary.is_some() && all.api_key_file.is_some());
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
        let args = NodeArgs {
            listen: Some("127.0.0.1:0".into()),
            log_format: Some(LogFormat::Json),
            ..Default::default()
        };
        let resolved = args.decide(file, &exe).unwrap();
        assert_eq!(resolved.node.data_dir, PathBuf::from("/f"));
        assert_eq!(resolved.node.listen, "127.0.0.1:0");
        assert_eq!(resolved.node.run_dir, PathBuf::from("/run/keiki"));
        assert_eq!(resolved.node.engine, Some(EngineKind::Kvm));
        assert_eq!(resolved.log_format, LogFormat::Json);
        assert!(resolved.node.api_keys.is_empty());
        let typed = NodeArgs { engine: Some(Engine::Qemu), ..Default::default() };
        let file = File { engine: Some(Engine::Kvm), ..Default::default() };
        assert_eq!(typed.decide(file, &exe).unwrap().node.engine, Some(EngineKind::Qemu));
    }

    #[test]
    fn the_guest_is_found_in_lib_first_then_beside() {
        let dir = tempfile::tempdir().unwrap();
        let exe = install(dir.path());
        let found =
            |exe| NodeArgs::default().decide(File::default(), exe).map(|resolved| resolved.node.guest_binary);
        assert_eq!(found(&exe).unwrap(), dir.path().join("bin/keiki-guest"));
        fs::write(dir.path().join("lib/keiki/keiki-guest"), "").unwrap();
        assert_eq!(found(&exe).unwrap(), dir.path().join("bin/../lib/keiki/keiki-guest"));
        assert!(
            found(&dir.path().join("other/bin/keiki")).unwrap_err().to_string().contains("--guest-binary")
        );
    }

    #[test]
    fn mistakes_are_told() {
        let error = parse("datadir = '/x'", "my.toml").unwrap_err().to_string();
        assert!(error.contains("my.toml") && error.contains("datadir"), "{error}");
        assert!(parse("engine = 'xen'", "t").is_err());
        let error = parse("snapshot_max_age = '30 days'", "t").unwrap_err().to_string();
        assert!(error.contains("is no duration"), "{error}");
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
