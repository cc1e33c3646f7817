//! How pictures look. There is no background, and lines and letters are of middle brightness, so that they are readable
//! on light and on dark.

use plotters::chart::{ChartContext, MeshStyle};
use plotters::coord::ranged1d::{Ranged, ValueFormatter};
use plotters::prelude::*;

/// Letters, axes, and what nothing was done to.
pub const GRAY: RGBColor = RGBColor(128, 128, 128);

// A middle brightness of the colours of M. Okabe and K. Ito, "Color Universal Design" (2008).
pub const LIGHT_GRAY: RGBColor = RGBColor(140, 140, 140);
pub const OCHRE: RGBColor = RGBColor(190, 150, 20);
pub const PINK: RGBColor = RGBColor(204, 121, 167);
pub const BLUE: RGBColor = RGBColor(60, 150, 210);
pub const VERMILION: RGBColor = RGBColor(213, 94, 0);
/// What is ours.
pub const GREEN: RGBColor = RGBColor(0, 158, 115);

/// Letters of a size, in a colour.
pub fn text_style(size: u32, color: RGBColor) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&color)
}

/// Axes with lines across, to be given their names.
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
