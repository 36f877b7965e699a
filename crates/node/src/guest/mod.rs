//! Everything that reaches into a guest: the connection to its agent, through the gate for a new copy, and what callers
//! do over it.

mod dial;
mod exec;
mod files;
mod gate;
mod link;
mod ports;
pub mod secrets;
mod trees;
mod upload;

#[cfg(test)]
mod tests;

pub use gate::{Gate, Secrets};
pub use link::{GuestLink, plain, refusal};
