//! Errors as people read them.

use std::error::Error;

/// An error and its causes on one line: `a: b: c`.
#[must_use]
pub fn error_chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += ": ";
        text += &error.to_string();
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::error_chain;
    use std::{error::Error, fmt, io};

    #[derive(Debug)]
    struct Failed(&'static str, io::Error);

    impl fmt::Display for Failed {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Failed {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            Some(&self.1)
        }
    }

    #[test]
    fn every_cause_follows_its_error() {
        let inner = Failed("reading the file", io::Error::other("disk on fire"));
        let outer = Failed("loading", io::Error::other(inner));
        assert_eq!(error_chain(&io::Error::other("alone")), "alone");
        // An `io::Error` shows the error it holds and continues with that one's cause.
        assert_eq!(error_chain(&outer), "loading: reading the file: disk on fire");
    }
}
