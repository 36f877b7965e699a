//! The commands, one file each.

pub mod bench;
pub mod completion;
pub mod cp;
pub mod create;
pub mod demo;
pub mod doctor;
pub mod exec;
pub mod fork;
pub mod forward;
pub mod hibernate;
pub mod inspect;
pub mod logs;
pub mod ls;
pub mod node;
pub mod pause;
pub mod restore;
pub mod resume;
pub mod rm;
pub mod run;
pub mod shell;
pub mod snapshot;
pub mod snapshots;
pub mod template;
pub mod tree;
mod verb;
pub mod version;
pub mod wake;
