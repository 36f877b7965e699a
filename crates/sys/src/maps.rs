//! The memory mappings of a process: `/proc/PID/maps`.

use std::{fs, io, ops::Range};

/// A line of `/proc/PID/maps`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    pub addresses: Range<u64>,
    /// Private and writable: nothing else can write here.
    pub private_writable: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Device of the file, major and minor.
    pub device: (u32, u32),
    /// Inode of the file. 0: anonymous memory.
    pub inode: u64,
}

/// The mappings of a process, in the order of addresses.
pub fn of_process(pid: u32) -> io::Result<Vec<Mapping>> {
    let text = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    Ok(text.lines().filter_map(parse).collect())
}

fn parse(line: &str) -> Option<Mapping> {
    let mut fields = line.split_ascii_whitespace();
    let (addresses, flags, offset) = (fields.next()?, fields.next()?, fields.next()?);
    let (device, inode) = (fields.next()?, fields.next()?);
    let hex = |text| u64::from_str_radix(text, 16).ok();
    let (start, end) = addresses.split_once('-')?;
    let (major, minor) = device.split_once(':')?;
    let number = |text| u32::from_str_radix(text, 16).ok();
    Some(Mapping {
        addresses: hex(start)?..hex(end)?,
        private_writable: flags.contains('w') && flags.ends_with('p'),
        offset: hex(offset)?,
        device: (number(major)?, number(minor)?),
        inode: inode.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::{Mapping, of_process, parse};

    #[test]
    fn every_field_of_a_line_is_read() {
        let line = "7f0000000000-7f0000400000 rw-p 00200000 fe:1a 1234   /store/vm.mem (deleted)";
        let wanted = Mapping {
            addresses: 0x7f00_0000_0000..0x7f00_0040_0000,
            private_writable: true,
            offset: 0x20_0000,
            device: (0xfe, 0x1a),
            inode: 1234,
        };
        assert_eq!(parse(line), Some(wanted));
        for other in ["rw-s", "r--p", "r-xp"] {
            assert!(parse(&line.replace("rw-p", other)).is_some_and(|found| !found.private_writable));
        }
        assert_eq!(
            parse("7f0000000000-7f0000400000 rw-p 00000000 00:00 0").map(|found| found.inode),
            Some(0)
        );
        assert_eq!(parse("7f00 rw-p 0 0:0 0"), None);
        assert!(of_process(std::process::id()).is_ok_and(|found| !found.is_empty()));
    }
}
