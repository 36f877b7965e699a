//! The program `keiki-vmm`. The code is in the library.

use keiki_control::Start;

fn main() {
    if std::env::args_os().nth(1).is_some_and(|word| word == "--probe") {
        return probe();
    }
    match Start::from_args(std::env::args_os().skip(1)) {
        Ok(start) => keiki_vmm::process::run(&start),
        Err(error) => end(&error.to_string()),
    }
}

/// Prints `keiki-vmm VERSION SPEED`, or why KVM cannot be used.
fn probe() {
    match keiki_vmm::probe::instructions_per_second() {
        Ok(speed) => println!("keiki-vmm {} {speed}", env!("CARGO_PKG_VERSION")),
        Err(why) => end(&why),
    }
}

fn end(why: &str) -> ! {
    eprintln!("keiki-vmm: {why}");
    std::process::exit(keiki_vmm::EXIT_START)
}
