//! Removing and linking files, with errors that name the files.

use crate::{EngineError, Result};
use std::{
    fs,
    io::{self, ErrorKind},
    path::Path,
};

/// Removes a file. It is not an error if it does not exist.
pub(crate) fn remove_file(path: &Path) -> Result<()> {
    unless_gone(fs::remove_file(path)).map_err(EngineError::at("remove", path))
}

/// Removes a directory and its contents. It is not an error if it does not exist.
pub(crate) fn remove_dir(path: &Path) -> Result<()> {
    unless_gone(fs::remove_dir_all(path)).map_err(EngineError::at("remove", path))
}

/// Gives a base file another name.
pub(crate) fn link(from: &Path, to: &Path) -> Result<()> {
    fs::hard_link(from, to).map_err(EngineError::at("link", to))
}

/// Makes a file that shares the blocks of another.
pub(crate) fn reflink(from: &Path, to: &Path) -> Result<()> {
    let source = fs::File::open(from).map_err(EngineError::at("open", from))?;
    let copy = fs::File::create_new(to).map_err(EngineError::at("make", to))?;
    keiki_sys::files::reflink(&source, &copy).map_err(EngineError::at("fill", to))
}

fn unless_gone(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        other => other,
    }
}
