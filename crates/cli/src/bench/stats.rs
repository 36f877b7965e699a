//! Percentiles.

/// The nearest-rank percentile: the smallest sample not exceeded by at least `percent` of a hundred
/// samples. None without samples.
pub fn percentile(samples: &[f64], percent: usize) -> Option<f64> {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent.min(100) * sorted.len()).div_ceil(100).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::percentile;

    #[test]
    fn nearest_rank() {
        let samples = [15.0, 50.0, 20.0, 40.0, 35.0];
        for (percent, value) in
            [(0, 15.0), (5, 15.0), (20, 15.0), (21, 20.0), (30, 20.0), (40, 20.0), (50, 35.0)]
        {
            assert_eq!(percentile(&samples, percent), Some(value), "{percent}");
        }
        assert_eq!(percentile(&samples, 100), Some(50.0));
        assert_eq!(percentile(&samples, 99), Some(50.0));
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(percentile(&[7.0], 1), Some(7.0));
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!([50, 90, 99].map(|p| percentile(&hundred, p)), [Some(50.0), Some(90.0), Some(99.0)]);
    }
}
