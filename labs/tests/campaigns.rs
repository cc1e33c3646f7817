use pagefold_ab::decide::statistics::interval::{Bootstrap, IntervalMethod};
use pagefold_ab::decide::statistics::log_ratio;
use pagefold_labs::campaigns::run_times::RunTimeModel;
use pagefold_labs::campaigns::simulate;
use pagefold_ab::decide::design::{Arm, BlockKind};
#[test]
fn explore() {
    use IntervalMethod::*;
    let methods = [Bca, ExpandedBca, ExpandedPercentile, BootstrapT, StudentT];
    for blocks in [10, 20, 40] {
        for model in RunTimeModel::ALL {
            let mut hits = [0; 5]; let mut n = 0;
            for seed in 0..700 {
                let s = simulate(model, blocks, seed);
                for (kind, truth) in [(BlockKind::SameArm, 1.0f64), (BlockKind::Comparison, 1.01), (BlockKind::Injected { slowdown_percent: 2 }, 1.02), (BlockKind::Injected { slowdown_percent: 5 }, 1.05)] {
                    let v: Vec<f64> = s.iter().filter(|b| b.kind == kind).map(|b| {
                        let of = |l| b.runs.iter().filter(|r| r.label == l).map(|r| r.metrics[0][0]).collect::<Vec<_>>();
                        log_ratio(&of(Arm::A), &of(Arm::B)) }).collect();
                    let b = Bootstrap::with_studentized_means(&v, 2000, seed);
                    n += 1;
                    for (h, m) in hits.iter_mut().zip(methods) { *h += i32::from(b.interval(m, 0.95).contains(truth.ln())); }
                }
            }
            println!("{blocks} {:16} {:?}", model.name(), hits.map(|h| format!("{:.3}", f64::from(h) / f64::from(n))));
        }
    }
    println!("{methods:?}");
}
