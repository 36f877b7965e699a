//! tmp
#![allow(missing_docs)]
use serde::{Deserialize, Serialize};
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Manifest { pub shape: keiki_types::Shape, pub layers: Vec<(String, String)> }
