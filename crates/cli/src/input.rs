//! Standard input, as it arrives.

use crate::exit::{Failure, io_error};
use bytes::Bytes;
use std::{
    io::{self, Read},
    time::Duration,
};
use tokio::sync::mpsc;

/// Bytes per read.
const PIECE: usize = 64 << 10;

/// Reads on a thread of its own: a read of a terminal or pipe cannot be cancelled, so the process
/// exits while it waits. The channel closes at the end of the input.
pub fn pieces() -> Result<mpsc::Receiver<io::Result<Bytes>>, Failure> {
    let (send, inbox) = mpsc::channel(4);
    let read_all = move || {
        let mut buffer = vec![0; PIECE];
        loop {
            let read = match io::stdin().lock().read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => Ok(Bytes::copy_from_slice(&buffer[..count])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    std::thread::sleep(Duration::from_millis(10));
                    continue;
                }
                Err(error) => Err(error),
            };
            let failed = read.is_err();
            if send.blocking_send(read).is_err() || failed {
                return;
            }
        }
    };
    let thread = std::thread::Builder::new().name("input".into()).spawn(read_all);
    thread.map(|_| inbox).map_err(io_error("cannot start the input thread"))
}
