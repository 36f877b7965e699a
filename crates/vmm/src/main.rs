//! The binary: everything is in the library.

use keiki_control::Start;

fn main() {
    match Start::from_args(std::env::args_os().skip(1)) {
        Ok(start) => keiki_vmm::process::live(&start),
        Err(error) => {
            eprintln!("keiki-vmm: {error}");
            std::process::exit(keiki_vmm::process::EXIT_START);
        }
    }
}
