//! Compiles the schema without a system `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let descriptors = protox::compile(["proto/guest.proto"], ["proto"])?;
    println!("cargo:rerun-if-changed=proto/guest.proto");
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
