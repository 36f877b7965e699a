//! A separate apt configuration: sources, lists and archives in the cache, nothing on the host
//! changed.
//!
//! Only two things are read from the host's configuration: the address of its Debian mirror, and
//! how it reaches the network (proxies).

use crate::{
    Builder,
    error::{Error, Result, io_error},
    tool::Tool,
};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Overrides the host's mirror.
const MIRROR_VARIABLE: &str = "KEIKI_DEBIAN_MIRROR";
/// Debian's archive keys, part of every Debian system.
const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";
/// What apt prints about each index file that it would fetch, see [`Target::parse`].
const TARGET_FORMAT: &str = "$(CREATED_BY)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(LABEL)";
/// The host's settings for reaching the network.
const NETWORK_SETTINGS: [&str; 4] =
    ["Acquire::http::", "Acquire::https::", "Acquire::Retries", "Acquire::ForceIPv"];

/// apt with a separate configuration.
pub(crate) struct Apt {
    config: PathBuf,
}

/// A package on a mirror.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) version: String,
    pub(crate) depends: Vec<String>,
    pub(crate) size: u64,
}

/// The Debian mirror that the host uses.
pub(crate) fn host_mirror() -> Result<String> {
    if let Some(mirror) = std::env::var(MIRROR_VARIABLE).ok().filter(|mirror| !mirror.is_empty()) {
        return Ok(mirror.trim_end_matches('/').to_owned());
    }
    let targets = host_targets()?;
    choose_mirror(&targets).ok_or(Error::NoMirror)
}

/// The mirror of security updates that the host uses, if any.
pub(crate) fn host_security_mirror() -> Option<String> {
    let targets = host_targets().ok()?;
    targets.iter().find(|target| target.is_security()).map(|target| target.uri.clone())
}

/// The archive keys, if this host has them; otherwise apt uses its trusted keys.
pub(crate) fn keyring() -> Option<&'static Path> {
    Some(Path::new(KEYRING)).filter(|path| path.exists())
}

impl Apt {
    /// Creates the configuration for one line of sources and fetches its lists.
    pub(crate) fn open(builder: &Builder, mirror: &str, suite: &str) -> Result<Self> {
        let dir = builder.cache.dir("apt")?;
        for sub in ["lists/partial", "archives/partial"] {
            let sub = dir.join(sub);
            fs::create_dir_all(&sub).map_err(io_error("creating", &sub))?;
        }
        let write = |name: &str, text: &str| {
            let path = dir.join(name);
            fs::write(&path, text).map_err(io_error("writing", &path)).map(|()| path)
        };
        let signed = keyring().map(|path| format!("[signed-by={}] ", path.display())).unwrap_or_default();
        write("sources.list", &format!("deb {signed}{mirror} {suite} main\n"))?;
        // No package is installed here.
        write("status", "")?;
        let config = write("apt.conf", &config_text(&dir, &network_settings()?))?;
        let apt = Self { config };
        apt.tool("apt-get", "reading the package lists").args(["update", "-q"]).lines(|_| ())?;
        Ok(apt)
    }

    /// The newest package of this name.
    pub(crate) fn show(&self, name: &str) -> Result<Package> {
        let tool = self.tool("apt-cache", format!("looking for the package {name}"));
        let text = tool.args(["show", "--no-all-versions", name]).output()?;
        Package::parse(&String::from_utf8_lossy(&text))
            .ok_or_else(|| Error::BadKernel(format!("apt's description of {name} cannot be parsed")))
    }

    /// Downloads a package into `dir` and returns its path. A complete file is checked and kept, a
    /// partial one continued.
    pub(crate) fn download(
        &self,
        package: &Package,
        dir: &Path,
        on_percent: impl Fn(u32) + Sync,
    ) -> Result<PathBuf> {
        let wanted = format!("{}={}", package.name, package.version);
        let tool = self.tool("apt-get", format!("downloading {}", package.name)).dir(dir);
        let mut last = 0;
        tool.args(["download", "-q", "-o", "APT::Status-Fd=1", &wanted]).lines(|line| {
            if let Some(percent) = download_percent(line).filter(|&percent| percent >= last + 10) {
                last = percent;
                on_percent(percent);
            }
        })?;
        let prefix = format!("{}_", package.name);
        let entries = fs::read_dir(dir).map_err(io_error("listing", dir))?;
        let mut found = entries
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|e| e == "deb"))
            .filter(|path| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix)))
            .filter(|path| fs::metadata(path).is_ok_and(|meta| meta.len() == package.size));
        found.next().ok_or_else(|| Error::BadKernel(format!("{wanted} was downloaded but is missing")))
    }

    fn tool(&self, name: &'static str, action: impl Into<String>) -> Tool {
        Tool::new(name, action).env("APT_CONFIG", &self.config)
    }
}

/// This file is read before the host's and turns that off: its hooks would act on the host's
/// directories.
fn config_text(dir: &Path, network: &str) -> String {
    let dir = dir.display();
    format!(
        "Dir::Etc::parts \"/dev/null\";\n\
         Dir::Etc::main \"/dev/null\";\n\
         Dir::Etc::sourcelist \"{dir}/sources.list\";\n\
         Dir::Etc::sourceparts \"/dev/null\";\n\
         Dir::Etc::preferences \"/dev/null\";\n\
         Dir::Etc::preferencesparts \"/dev/null\";\n\
         Dir::State \"{dir}\";\n\
         Dir::State::lists \"{dir}/lists\";\n\
         Dir::State::status \"{dir}/status\";\n\
         Dir::Cache \"{dir}\";\n\
         Dir::Cache::archives \"{dir}/archives\";\n\
         Dir::Cache::pkgcache \"\";\n\
         Dir::Cache::srcpkgcache \"\";\n\
         APT::Architecture \"amd64\";\n\
         APT::Architectures {{ \"amd64\"; }};\n\
         APT::Update::Error-Mode \"any\";\n\
         APT::Sandbox::User \"\";\n\
         Acquire::Languages \"none\";\n\
         {network}"
    )
}

fn network_settings() -> Result<String> {
    let dump = Tool::new("apt-config", "reading the host's network settings").args(["dump"]).output()?;
    let dump = String::from_utf8_lossy(&dump);
    let ours = dump.lines().filter(|line| NETWORK_SETTINGS.iter().any(|setting| line.starts_with(setting)));
    Ok(ours.fold(String::new(), |text, line| text + line + "\n"))
}

impl Package {
    fn parse(paragraph: &str) -> Option<Self> {
        let field = |name: &str| {
            paragraph.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
        };
        let depends = field("Depends").unwrap_or_default().split(',');
        Some(Self {
            name: field("Package")?.to_owned(),
            version: field("Version")?.to_owned(),
            depends: depends.filter_map(|item| item.split_whitespace().next()).map(str::to_owned).collect(),
            size: field("Size")?.parse().ok()?,
        })
    }
}

/// An index file that the host's apt would fetch.
#[derive(Debug)]
struct Target {
    uri: String,
    release: String,
    label: String,
}

impl Target {
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split('|').collect();
        let [kind, uri, release, component, label] = fields[..] else { return None };
        if kind != "Packages" || component != "main" {
            return None;
        }
        let [uri, release, label] = [uri.trim_end_matches('/'), release, label].map(str::to_owned);
        Some(Self { uri, release, label })
    }

    /// `'http://mirror/debian/dists/bookworm/InRelease' NAME SIZE`
    fn parse_uri(line: &str) -> Option<Self> {
        let (address, _) = line.strip_prefix('\'')?.split_once('\'')?;
        let (uri, release) = address.strip_suffix("/InRelease")?.split_once("/dists/")?;
        Some(Self { uri: uri.to_owned(), release: release.to_owned(), label: String::new() })
    }

    fn is_security(&self) -> bool {
        self.label == "Debian-Security" || self.release.ends_with("-security")
    }
}

/// With labels if lists were ever fetched; otherwise, as in a fresh container, only addresses.
fn host_targets() -> Result<Vec<Target>> {
    let ask = |args: &[&str]| {
        Tool::new("apt-get", "asking the host's apt for its mirror")
            .args(args)
            .output()
            .map(|text| String::from_utf8_lossy(&text).into_owned())
    };
    let labelled = ask(&["indextargets", "--format", TARGET_FORMAT])?;
    let addresses = ask(&["update", "--print-uris"])?;
    Ok(labelled
        .lines()
        .filter_map(Target::parse)
        .chain(addresses.lines().filter_map(Target::parse_uri))
        .collect())
}

/// Labels are known once lists have been fetched; before that, a path that ends in `/debian` is
/// taken.
fn choose_mirror(targets: &[Target]) -> Option<String> {
    let labelled = |target: &&Target| target.label == "Debian" && !target.is_security();
    let looks_right = |target: &&Target| {
        target.label.is_empty() && !target.is_security() && target.uri.ends_with("/debian")
    };
    let found = targets.iter().find(labelled).or_else(|| targets.iter().find(looks_right));
    found.map(|target| target.uri.clone())
}

fn download_percent(line: &str) -> Option<u32> {
    let mut fields = line.strip_prefix("dlstatus:")?.split(':');
    fields.nth(1)?.split('.').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choose(lines: &[&str]) -> Option<String> {
        choose_mirror(&lines.iter().filter_map(|line| Target::parse(line)).collect::<Vec<_>>())
    }

    #[test]
    fn the_main_archive_is_chosen() {
        let security = "Packages|http://m.test/debian-security/|bookworm-security|main|Debian-Security";
        let other = "Packages|https://other.test/debian|bookworm|main|Other";
        let main = "Packages|http://m.test/debian/|bookworm|main|Debian";
        let index = "DEP-11|http://m.test/wrong/|bookworm|main|Debian";
        assert_eq!(choose(&[security, other, index, main]).as_deref(), Some("http://m.test/debian"));
        assert_eq!(choose(&[security, other]), None);
    }

    #[test]
    fn without_lists_the_path_is_the_sign() {
        let security = "Packages|http://m.test/debian-security/|bookworm-security|main|";
        let node = "Packages|https://node.test/x/|nodistro|main|";
        let main = "Packages|http://m.test/debian/|bookworm|main|";
        assert_eq!(choose(&[security, node, main]).as_deref(), Some("http://m.test/debian"));
        assert_eq!(choose(&[security, node]), None);
    }

    #[test]
    fn addresses_are_read_where_there_are_no_lists() {
        let lines = [
            "'http://m.test/debian-security/dists/bookworm-security/InRelease' x 0 ",
            "'http://m.test/debian/dists/bookworm/main/binary-amd64/Packages.xz' x 0 ",
            "'http://m.test/debian/dists/bookworm/InRelease' x 0 ",
        ];
        let targets: Vec<Target> = lines.iter().filter_map(|line| Target::parse_uri(line)).collect();
        assert_eq!(targets.len(), 2);
        assert!(targets[0].is_security());
        assert_eq!(choose_mirror(&targets).as_deref(), Some("http://m.test/debian"));
    }

    #[test]
    fn a_description_is_read() {
        let text = "Package: linux-image-cloud-amd64\nSource: x\nVersion: 6.12-1~bpo\nInstalled-Size: 12\n\
                    Depends: linux-image-6.12-cloud-amd64 (= 6.12-1), other\nSize: 1480\nDescription: x\n";
        let package = Package::parse(text).unwrap();
        assert_eq!(package.depends, ["linux-image-6.12-cloud-amd64", "other"]);
        assert_eq!((package.version.as_str(), package.size), ("6.12-1~bpo", 1480));
        assert_eq!(Package::parse("Package: x\n"), None);
    }

    #[test]
    fn percents_of_a_download() {
        assert_eq!(download_percent("dlstatus:1:33.3333:Retrieving file 1 of 1"), Some(33));
        assert_eq!(download_percent("Get:1 somewhere"), None);
    }
}
