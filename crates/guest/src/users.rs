//! Users and groups, read from the sandbox's `/etc/passwd` and `/etc/group`. Needs nothing
//! installed; a damaged line affects only its own user.

use std::{fs, io::Read};

const PASSWD: &str = "/etc/passwd";
const GROUP: &str = "/etc/group";
/// Files are read up to this size.
const LIMIT: u64 = 4 << 20;

/// The account that a command runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    /// Login name, or the uid if it has none.
    pub name: Vec<u8>,
    pub uid: u32,
    pub gid: u32,
    /// All groups, the primary one first.
    pub groups: Vec<u32>,
    pub home: Vec<u8>,
    pub shell: Vec<u8>,
}

/// No such user.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no such user in this sandbox: {0:?}")]
pub struct UnknownUser(String);

/// Finds `name`, `uid` or `uid:gid`; root if empty. A numeric uid needs no entry.
pub fn lookup(wanted: &str) -> Result<Account, UnknownUser> {
    resolve(wanted, &slurp(PASSWD, LIMIT), || slurp(GROUP, LIMIT))
}

/// The first `limit` bytes of a file. Empty if it cannot be read.
pub fn slurp(path: &str, limit: u64) -> Vec<u8> {
    let mut text = Vec::new();
    if let Ok(file) = fs::File::open(path) {
        // Bytes read before an error are still good.
        let _ = file.take(limit).read_to_end(&mut text);
    }
    text
}

fn resolve(wanted: &str, passwd: &[u8], group: impl FnOnce() -> Vec<u8>) -> Result<Account, UnknownUser> {
    let unknown = || UnknownUser(wanted.chars().take(64).collect());
    let wanted = if wanted.is_empty() { "0" } else { wanted };
    let (user, group_wanted) = match wanted.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (wanted, None),
    };
    let number: Option<u32> = user.parse().ok();
    let entry = passwd.split(|&b| b == b'\n').filter_map(parse_user).find(|entry| match number {
        Some(uid) => entry.uid == uid,
        None => entry.name == user.as_bytes(),
    });
    let mut account = match (entry, number) {
        (Some(entry), _) => entry,
        (None, Some(uid)) => bare(uid),
        (None, None) => return Err(unknown()),
    };
    let group_file = group();
    match group_wanted {
        // As usual, an explicit group is the only one.
        Some(group) => {
            account.gid = group
                .parse()
                .ok()
                .or_else(|| lines(&group_file).find(|g| g.name == group.as_bytes()).map(|g| g.gid))
                .ok_or_else(unknown)?;
            account.groups = vec![account.gid];
        }
        None => {
            account.groups = vec![account.gid];
            for entry in lines(&group_file) {
                let member = entry.members.split(|&b| b == b',').any(|name| name == account.name);
                if member && !account.groups.contains(&entry.gid) && account.groups.len() < 1024 {
                    account.groups.push(entry.gid);
                }
            }
        }
    }
    Ok(account)
}

/// A user without an entry.
fn bare(uid: u32) -> Account {
    let (name, home): (Vec<u8>, &[u8]) =
        if uid == 0 { (b"root".to_vec(), b"/root") } else { (uid.to_string().into_bytes(), b"/") };
    Account { name, uid, gid: uid, groups: vec![], home: home.to_vec(), shell: b"/bin/sh".to_vec() }
}

/// `name:password:uid:gid:comment:home:shell`.
fn parse_user(line: &[u8]) -> Option<Account> {
    let fields: Vec<&[u8]> = line.split(|&b| b == b':').collect();
    let [name, _, uid, gid, _, home, shell] = fields[..] else { return None };
    let or = |value: &[u8], otherwise: &[u8]| if value.is_empty() { otherwise } else { value }.to_vec();
    (!name.is_empty()).then_some(())?;
    Some(Account {
        name: name.to_vec(),
        uid: parse_number(uid)?,
        gid: parse_number(gid)?,
        groups: vec![],
        home: or(home, b"/"),
        shell: or(shell, b"/bin/sh"),
    })
}

struct GroupLine<'a> {
    name: &'a [u8],
    gid: u32,
    members: &'a [u8],
}

/// `name:password:gid:member,member`.
fn lines(file: &[u8]) -> impl Iterator<Item = GroupLine<'_>> {
    file.split(|&b| b == b'\n').filter_map(|line| {
        let fields: Vec<&[u8]> = line.split(|&b| b == b':').collect();
        let [name, _, gid, members] = fields[..] else { return None };
        Some(GroupLine { name, gid: parse_number(gid)?, members })
    })
}

fn parse_number(digits: &[u8]) -> Option<u32> {
    std::str::from_utf8(digits).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::{Account, resolve};

    const PASSWD: &[u8] = b"root:x:0:0:root:/root:/bin/bash\nbroken line\nbad:x:nan:0::/:\n\
        amy:x:1000:100:Amy,,,:/home/amy:\nlast:x:5:6::/l:/bin/false";
    const GROUP: &[u8] = b"root:x:0:\nusers:x:100:amy\nsudo:x:27:bob,amy\ndocker:x:99:amyx\nvideo:x:44:amy";

    fn find(who: &str) -> Result<Account, String> {
        resolve(who, PASSWD, || GROUP.to_vec()).map_err(|e| e.to_string())
    }

    #[test]
    fn names_and_numbers_find_the_same_account() {
        let amy = find("amy").unwrap();
        assert_eq!((amy.uid, amy.gid), (1000, 100));
        assert_eq!(amy.groups, [100, 27, 44]);
        assert_eq!(amy.home, b"/home/amy");
        assert_eq!(amy.shell, b"/bin/sh");
        assert_eq!(find("1000").unwrap(), amy);
        assert_eq!(find("").unwrap().shell, b"/bin/bash");
        assert_eq!(find("last").unwrap().uid, 5);
    }

    #[test]
    fn a_number_needs_no_entry_and_a_group_stands_alone() {
        let nobody = find("4242").unwrap();
        assert_eq!((nobody.uid, nobody.gid, nobody.name.as_slice()), (4242, 4242, &b"4242"[..]));
        assert_eq!(find("1000:7").unwrap().groups, [7]);
        assert_eq!(find("amy:video").unwrap().gid, 44);
    }

    #[test]
    fn unknown_and_damaged_entries_are_refused() {
        for who in ["bob", "bad", "broken line", "amy:nogroup", ":", "-1"] {
            assert!(find(who).unwrap_err().contains("no such user"), "{who}");
        }
    }

    #[test]
    fn a_sandbox_without_users_still_has_root() {
        let root = resolve("", b"", Vec::new).unwrap();
        assert_eq!((root.uid, root.home.as_slice(), &root.groups[..]), (0, &b"/root"[..], &[0][..]));
    }
}
