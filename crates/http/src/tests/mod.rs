//! The layer over a small node in memory: without a socket ([`answers`], [`log`]), and with one ([`live`]).

mod answers;
mod live;
mod log;
mod observe;
mod proxy;
