//! Colors of machines and vCPUs.
//!
//! The first seven machines have the colors of Okabe and Ito (Color Universal Design, 2008), which people with the usual
//! kinds of color blindness tell apart. More machines need hues that some of them do not. The names in the legend and in
//! the titles of areas do not depend on colors.

use super::ShownTask;

/// Red, green and blue, 0 to 255.
type Rgb = [u8; 3];

/// The palette of Okabe and Ito without black: blue, orange, bluish green, reddish purple, vermilion, sky blue, yellow.
const PALETTE: [Rgb; 7] = [
    [0x00, 0x72, 0xb2],
    [0xe6, 0x9f, 0x00],
    [0x00, 0x9e, 0x73],
    [0xcc, 0x79, 0xa7],
    [0xd5, 0x5e, 0x00],
    [0x56, 0xb4, 0xe9],
    [0xf0, 0xe4, 0x42],
];
/// Tasks of no machine.
const OTHER_TASK: Rgb = [0x9a, 0x9a, 0x9a];
/// Share of black in the color of a machine's first vCPU.
const DARKEST: f64 = 0.35;
/// Share of white in the color of a machine's last vCPU.
const BRIGHTEST: f64 = 0.6;
/// The angle between the hues of successive machines beyond the palette, in degrees: the golden angle.
const HUE_STEP_DEGREES: f64 = 137.508;

/// The color of a task as `#rrggbb`. `vcpus` is the number of vCPUs of its machine.
pub fn color(shown: ShownTask, vcpus: usize) -> String {
    let [red, green, blue] = match shown {
        ShownTask::Vcpu { vm, position } => shade(base_color(vm), position, vcpus),
        ShownTask::OtherThread { vm } => mix(base_color(vm), OTHER_TASK, 0.65),
        ShownTask::OtherTask => OTHER_TASK,
    };
    format!("#{red:02x}{green:02x}{blue:02x}")
}

fn base_color(vm: usize) -> Rgb {
    PALETTE.get(vm).copied().unwrap_or_else(|| {
        let hue = (vm - PALETTE.len()) as f64 * HUE_STEP_DEGREES;
        // Cosines a third of a circle apart; each channel is between 40 and 215.
        [0.0, 120.0, 240.0].map(|offset| (127.5 + 87.5 * (hue - offset).to_radians().cos()).round() as u8)
    })
}

/// From dark for the first vCPU to bright for the last; the machine's own color for a single one.
fn shade(base: Rgb, position: usize, vcpus: usize) -> Rgb {
    if vcpus < 2 {
        return base;
    }
    let place = position as f64 / (vcpus - 1) as f64 * (DARKEST + BRIGHTEST) - DARKEST;
    if place < 0.0 { mix(base, [0; 3], -place) } else { mix(base, [255; 3], place) }
}

fn mix(from: Rgb, to: Rgb, share: f64) -> Rgb {
    std::array::from_fn(|channel| {
        (f64::from(from[channel]) * (1.0 - share) + f64::from(to[channel]) * share).round() as u8
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn luminance(color: &str) -> u32 {
        let channel = |at: usize| u32::from_str_radix(&color[at..at + 2], 16).unwrap();
        2126 * channel(1) + 7152 * channel(3) + 722 * channel(5)
    }

    #[test]
    fn vcpus_become_brighter() {
        for vm in 0..20 {
            let colors: Vec<String> = (0..8).map(|position| color(ShownTask::Vcpu { vm, position }, 8)).collect();
            assert!(colors.windows(2).all(|pair| luminance(&pair[0]) < luminance(&pair[1])), "{vm}: {colors:?}");
        }
    }

    #[test]
    fn machines_have_different_colors() {
        let colors: BTreeSet<String> = (0..40).map(|vm| color(ShownTask::Vcpu { vm, position: 0 }, 1)).collect();
        assert_eq!(colors.len(), 40);
        assert_eq!(color(ShownTask::Vcpu { vm: 0, position: 0 }, 1), "#0072b2");
        assert_eq!(color(ShownTask::OtherTask, 0), "#9a9a9a");
    }
}
