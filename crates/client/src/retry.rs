//! Retries of create and fork.
//!
//! The node answers 503 or 429 with `Retry-After` only if it created nothing, so a retry cannot
//! create two. The wait is the node's hint plus a growing random part, so that clients refused
//! together do not return together.

use crate::error::{Error, Result};
use std::{
    hash::{BuildHasher, RandomState},
    time::{Duration, Instant},
};

/// A refused request that will be retried.
#[derive(Debug, Clone)]
pub struct Retry {
    /// 1 for the first refusal.
    pub attempt: u32,
    pub status: u16,
    pub message: String,
    /// Wait before the next attempt.
    pub delay: Duration,
}

const CAPS: [u64; 5] = [1, 2, 4, 8, 15];

/// The wait before the next attempt: the hint plus `random` (0 to 1) of a growing cap, within what
/// is left of the budget. None if the hint alone exceeds it.
pub(crate) fn delay(attempt: u32, hint: Duration, left: Duration, random: f64) -> Option<Duration> {
    if hint > left || left.is_zero() {
        return None;
    }
    let at = (attempt.saturating_sub(1) as usize).min(CAPS.len() - 1);
    let jitter = Duration::from_secs(CAPS[at]).mul_f64(random.clamp(0.0, 1.0));
    Some((hint + jitter).min(left))
}

/// Calls `send` until it succeeds, fails for good, or the budget is spent.
pub(crate) async fn with_budget<T, F>(
    budget: Duration,
    notify: Option<&(dyn Fn(&Retry) + Send + Sync)>,
    mut send: impl FnMut() -> F,
) -> Result<T>
where
    F: Future<Output = Result<T>>,
{
    let start = Instant::now();
    for attempt in 1.. {
        let error = match send().await {
            Ok(done) => return Ok(done),
            Err(error) => error,
        };
        let Error::Api { status: status @ (503 | 429), message, retry_after: Some(hint), .. } = &error else {
            return Err(error);
        };
        let left = budget.saturating_sub(start.elapsed());
        let Some(delay) = delay(attempt, *hint, left, random()) else { return Err(error) };
        if let Some(notify) = notify {
            notify(&Retry { attempt, status: *status, message: message.clone(), delay });
        }
        tokio::time::sleep(delay).await;
    }
    Err(Error::Protocol("the node refused too many times".into()))
}

/// A random number from 0 to 1: the standard library seeds every hasher state.
fn random() -> f64 {
    f64::from(RandomState::new().hash_one(0u8) as u32) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::{delay, with_budget};
    use crate::error::{Error, Result};
    use std::time::Duration;

    const SECOND: Duration = Duration::from_secs(1);

    fn refusal(retry_after: Option<Duration>) -> Error {
        Error::Api { status: 503, message: "busy".into(), console: None, retry_after }
    }

    #[test]
    fn waits_grow_and_stay_within_the_budget() {
        assert_eq!(delay(1, SECOND, 60 * SECOND, 0.0), Some(SECOND));
        assert_eq!(delay(1, SECOND, 60 * SECOND, 1.0), Some(2 * SECOND));
        assert_eq!(delay(99, SECOND, 60 * SECOND, 1.0), Some(16 * SECOND));
        assert_eq!(delay(5, SECOND, 3 * SECOND, 1.0), Some(3 * SECOND));
        assert_eq!(delay(1, 5 * SECOND, 3 * SECOND, 0.0), None);
        assert_eq!(delay(1, Duration::ZERO, Duration::ZERO, 1.0), None);
    }

    #[tokio::test]
    async fn only_refusals_with_a_hint_are_tried_again() {
        let mut calls = 0;
        let done: Result<u32> = with_budget(SECOND, None, || {
            calls += 1;
            let answer = if calls < 3 { Err(refusal(Some(Duration::ZERO))) } else { Ok(calls) };
            async { answer }
        })
        .await;
        // The random part may spend the budget before the third call; then the refusal is the
        // answer.
        assert!(matches!(done, Ok(3) | Err(Error::Api { status: 503, .. })), "{done:?}");
        assert!(calls >= 2);

        let mut calls = 0;
        let bare: Result<()> = with_budget(SECOND, None, || {
            calls += 1;
            async { Err(refusal(None)) }
        })
        .await;
        assert!(bare.is_err());
        assert_eq!(calls, 1);
    }
}
