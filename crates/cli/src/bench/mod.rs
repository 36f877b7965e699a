//! Measures a node from outside, as its users see it.
//!
//! Client-side metrics run from the request to the first event of a command (`true` has no output,
//! so that is its exit). `restore_step`, `fork_pause` and `fork_user_pause` are the node's own
//! measurements. All samples are kept, and percentiles are samples, never interpolated.
//!
//! ```text
//!   run ── creates, commands, forks, memory, snapshots     one file per group
//!    └──> Report (JSON) ──> compare: two reports    chart: one report as a picture
//! ```

mod chart;
mod commands;
mod compare;
mod creates;
mod forks;
mod guest;
mod machine;
mod memory;
mod page_cache;
mod pick;
mod report;
mod run;
mod snapshots;
mod stats;

pub use chart::svg;
pub use compare::{Comparison, Verdict, compare};
pub use pick::{Metric, Pick};
pub use report::{Report, conditions};
pub use run::{Bench, Size, first_event};
