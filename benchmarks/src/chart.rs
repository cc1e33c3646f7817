//! The style of charts. They have no background; lines and text have medium brightness, so that they are readable on
//! light and dark pages.

use plotters::chart::{ChartContext, MeshStyle};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;

/// Text, axes, and the curve of the run without merging.
pub const GRAY: RGBColor = RGBColor(128, 128, 128);

// Medium brightness of the colors of M. Okabe and K. Ito, "Color Universal Design" (2008).
pub const LIGHT_GRAY: RGBColor = RGBColor(140, 140, 140);
pub const OCHRE: RGBColor = RGBColor(190, 150, 20);
pub const PINK: RGBColor = RGBColor(204, 121, 167);
pub const BLUE: RGBColor = RGBColor(60, 150, 210);
pub const VERMILION: RGBColor = RGBColor(213, 94, 0);
/// The curve of Pagefold.
pub const GREEN: RGBColor = RGBColor(0, 158, 115);

/// A text style of a size and color.
pub fn text_style(size: u32, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color)
}

/// Axes with grid lines; the caller adds the labels.
pub fn configure_axes<'c, 'a, X, Y>(
    chart: &'c mut ChartContext<'a, SVGBackend<'a>, Cartesian2d<X, Y>>,
) -> MeshStyle<'a, 'c, X, Y, SVGBackend<'a>>
where
    X: Ranged<ValueType = f64> + ValueFormatter<f64>,
    Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
{
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRAY.mix(0.3))
        .axis_style(GRAY)
        .label_style(text_style(14, GRAY))
        .axis_desc_style(text_style(14, GRAY));
    mesh
}
