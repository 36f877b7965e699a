//! KVM, guest memory and fork, behind a small safe interface.
