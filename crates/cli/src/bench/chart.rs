//! A report as a chart: for each metric a bar to its median, and a line to its 99th percentile.

use super::report::{Measured, Report, conditions};
use crate::exit::Failure;
use plotters::{
    chart::ChartBuilder,
    coord::Shift,
    drawing::{DrawingArea, IntoDrawingArea},
    element::{PathElement, Rectangle, Text},
    prelude::SVGBackend,
    style::{Color, IntoFont, RGBColor, ShapeStyle, WHITE},
};

const WIDTH: u32 = 1000;
const ROW: u32 = 20;
/// Space for a panel's title and axis.
const AROUND: u32 = 90;
const LABELS: u32 = 430;
const NUMBERS: u32 = 70;
const BAR: RGBColor = RGBColor(0x3b, 0x7d, 0xa8);
const TAIL: RGBColor = RGBColor(0x22, 0x3a, 0x4d);
const FONT: &str = "sans-serif";

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The picture, as SVG.
pub fn svg(report: &Report) -> Result<String, Failure> {
    let panels = ["ms", "MiB"].map(|unit| {
        let of = report.results.iter().filter(|result| result.unit == unit).collect::<Vec<_>>();
        (unit, of)
    });
    let panels: Vec<_> = panels.into_iter().filter(|(_, results)| !results.is_empty()).collect();
    if panels.is_empty() {
        return Err(Failure::Wrong("the report has no results to draw".into()));
    }
    let mut picture = String::new();
    let drawn = draw(&mut picture, report, &panels);
    drawn.map_err(|why| Failure::Wrong(format!("cannot draw the chart: {why}")))?;
    Ok(picture)
}

fn height(results: &[&Measured]) -> u32 {
    AROUND + ROW * u32::try_from(results.len()).unwrap_or(u32::MAX / (2 * ROW))
}

fn draw(
    picture: &mut String,
    report: &Report,
    panels: &[(&str, Vec<&Measured>)],
) -> Result<(), Box<dyn std::error::Error>> {
    let tall = panels.iter().map(|(_, results)| height(results)).sum();
    let mut rest = SVGBackend::with_string(picture, (WIDTH, tall)).into_drawing_area();
    rest.fill(&WHITE)?;
    for (unit, results) in panels {
        let (panel, below) = rest.split_vertically(height(results));
        let machine = &report.machine;
        let title = format!("{unit}: {}, {} cores, {}", machine.cpu, machine.cores, report.engine);
        draw_panel(&panel, &title, unit, results)?;
        rest = below;
    }
    rest.present()?;
    Ok(())
}

/// Milliseconds range from a few to many thousands, so their axis is logarithmic.
fn draw_panel(
    panel: &Area<'_>,
    title: &str,
    unit: &str,
    results: &[&Measured],
) -> Result<(), Box<dyn std::error::Error>> {
    let most = results.iter().map(|result| result.p99).fold(1.0, f64::max);
    let scale: fn(f64) -> f64 = if unit == "ms" { |value| value.max(1.0).log10() } else { |value| value };
    let rows = results.len() as f64;
    let mut chart = ChartBuilder::on(panel)
        .caption(title, (FONT, 14).into_font())
        .margin(8)
        .margin_right(NUMBERS)
        .x_label_area_size(30)
        .y_label_area_size(LABELS)
        .build_cartesian_2d(0.0..scale(most).max(0.1), 0.0..rows)?;
    let ticks = if unit == "ms" { scale(most).ceil() as usize + 1 } else { 8 };
    let shown = |at: &f64| if unit == "ms" { short(10f64.powf(*at)) } else { short(*at) };
    chart
        .configure_mesh()
        .disable_y_mesh()
        .disable_y_axis()
        .max_light_lines(0)
        .x_labels(ticks)
        .x_label_formatter(&shown)
        .label_style((FONT, 11).into_font())
        .draw()?;
    for (at, result) in results.iter().enumerate() {
        // First result on top.
        let middle = rows - at as f64 - 0.5;
        let (median, tail) = (scale(result.p50), scale(result.p99));
        chart.draw_series([Rectangle::new([(0.0, middle - 0.32), (median, middle + 0.32)], BAR.filled())])?;
        chart.draw_series([PathElement::new(
            vec![(median, middle), (tail, middle)],
            ShapeStyle::from(&TAIL).stroke_width(2),
        )])?;
        let line = chart.plotting_area().map_coordinate(&(0.0, middle));
        let end = chart.plotting_area().map_coordinate(&(tail, middle));
        let (left, top) = panel.get_base_pixel();
        let (label, half) = (format!("{} {}", result.name, conditions(&result.params)), 6);
        panel.draw(&Text::new(label, (16, line.1 - top - half), (FONT, 12).into_font()))?;
        panel.draw(&Text::new(
            short(result.p50),
            (end.0 - left + 6, end.1 - top - half),
            (FONT, 12).into_font(),
        ))?;
    }
    Ok(())
}

fn short(value: f64) -> String {
    match value {
        _ if value < 10.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::svg;
    use crate::bench::{pick::Metric, report::tests::report};
    use serde_json::json;

    #[test]
    fn every_result_is_in_the_picture_with_its_conditions_and_its_median() {
        let picture = svg(&report(&[
            (Metric::Kill, json!({}), 22.9),
            (Metric::ForkAll, json!({"children": 32, "guest": "idle"}), 4321.0),
            (Metric::ModelPssSum, json!({"state": "<started>"}), 1100.0),
        ]))
        .unwrap();
        assert!(picture.starts_with("<svg") && picture.trim_end().ends_with("</svg>"), "{picture}");
        for text in ["kill", "fork_all children=32 guest=idle", "4321", "23", "model_pss_sum", "1100"] {
            assert!(picture.contains(text), "{text}");
        }
        assert!(!picture.contains("<started>"), "text is escaped");
    }

    #[test]
    fn nothing_is_refused() {
        assert!(svg(&report(&[])).is_err());
    }
}
