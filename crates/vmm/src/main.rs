//! The binary: everything is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == "--probe") {
        return probe();
    }
    eprintln!("keiki-vmm is started by a keiki node, not by hand");
    ExitCode::FAILURE
}

/// `keiki-vmm VERSION SPEED`, or why not.
fn probe() -> ExitCode {
    match keiki_vmm::probe::instructions_per_second() {
        Ok(speed) => {
            println!("keiki-vmm {} {speed}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Err(why) => {
            eprintln!("{why}");
            ExitCode::FAILURE
        }
    }
}
