//! The binary: everything is in the library.

use keiki_control::Start;
use std::process::ExitCode;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|word| word == "--probe") {
        return probe();
    }
    match Start::from_args(std::env::args_os().skip(1)) {
        Ok(start) => keiki_vmm::process::live(&start),
        Err(error) => {
            eprintln!("keiki-vmm: {error}");
            std::process::exit(keiki_vmm::process::EXIT_START);
        }
    }
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
