//! Disk layers as QEMU's block nodes. QEMU gets each layer explicitly; no header names another
//! layer.

use serde_json::{Value, json};
use std::path::Path;

/// The raw bottom.
pub(super) fn raw_node(node: &str, path: &Path) -> Value {
    json!({"driver": "raw", "node-name": node, "read-only": true, "discard": "unmap",
        "file": {"driver": "file", "filename": path, "read-only": true, "locking": "off"}})
}

/// An immutable overlay.
pub(super) fn overlay_node(node: &str, path: &Path, backing: &str) -> Value {
    json!({"driver": "qcow2", "node-name": node, "read-only": true, "backing": backing,
        "file": {"driver": "file", "filename": path, "read-only": true, "locking": "off"}})
}

/// The writable top. Without a backing it says so (`null`): if absent, the header would decide. Its
/// file is not locked: once it is a lower layer, the monitors of relatives
/// open it while this one still holds it.
pub(super) fn top_node(node: &str, path: &Path, backing: Option<&str>) -> Value {
    json!({"driver": "qcow2", "node-name": node, "backing": backing, "discard": "unmap",
        "file": {"driver": "file", "filename": path, "locking": "off", "discard": "unmap"}})
}
