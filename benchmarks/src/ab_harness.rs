//! The analysis of experiments over simulated campaigns with known effects: false findings, found effects, coverage of
//! intervals, and what common rules conclude from the same runs.
//!
//! Rates do not depend on the speed of the machine.

use crate::BenchmarkEffort;
use crate::findings::{Findings, MarkdownTable, ThresholdCheck};
use anyhow::Result;
use pagefold_ab::decide::statistics::power::{PowerGoal, blocks_needed};
use pagefold_labs::campaigns::rivals::Rival;
use pagefold_labs::campaigns::run_times::RunTimeModel;
use pagefold_labs::campaigns::{CampaignRates, EFFECT_PERCENTS, METHODS, Rate, try_campaign};
use rayon::prelude::*;

/// The numbers of blocks whose rates are judged.
const BLOCKS: [usize; 3] = [10, 20, 40];
/// The number of blocks at which common rules are compared.
const RIVAL_BLOCKS: usize = 20;
/// Campaigns of a quick run.
const QUICK_CAMPAIGNS: u64 = 50;
/// The most campaigns that check a predicted number of blocks.
const MAX_PREDICTION_CAMPAIGNS: u64 = 1_000;
/// Predicted numbers of blocks above this are not simulated.
const MAX_SIMULATED_BLOCKS: usize = 100;
const RESAMPLES: usize = 1_000;
/// The permitted rate of differences in A/A.
const MAX_FALSE_FINDINGS: f64 = 0.05;
/// The permitted rate of "no effect larger than the margin" where the effect is as large as the margin.
const MAX_FALSE_EQUIVALENCE: f64 = 0.05;
/// The permitted coverage of the intervals, whose confidence is 95 %.
const COVERAGE: std::ops::RangeInclusive<f64> = 0.93..=0.97;

struct Cell {
    model: RunTimeModel,
    blocks: usize,
    rates: CampaignRates,
}

/// Simulate campaigns, on all CPUs.
fn simulate(model: RunTimeModel, blocks: usize, campaigns: u64) -> CampaignRates {
    (0..campaigns)
        .into_par_iter()
        .fold(CampaignRates::default, |rates, seed| rates.with(&try_campaign(model, blocks, RESAMPLES, seed)))
        .reduce(CampaignRates::default, |left, right| left.merge(&right))
}

pub fn measure(effort: BenchmarkEffort) -> Result<Findings> {
    let campaigns = if effort.quick { QUICK_CAMPAIGNS } else { effort.campaigns };
    let mut cells = Vec::new();
    for model in RunTimeModel::ALL {
        for blocks in BLOCKS {
            cells.push(Cell { model, blocks, rates: simulate(model, blocks, campaigns) });
            eprintln!("{}, {blocks} blocks: {campaigns} campaigns", model.name());
        }
    }
    let mut findings = Findings::new("model,blocks,effect_percent,rule,campaigns,findings,covered,equivalent");
    for cell in &cells {
        record(&mut findings.samples, cell);
    }
    findings.tables.push(rate_table(&cells, campaigns));
    findings.tables.push(method_table(&cells));
    findings.tables.push(blocks_table(&cells, campaigns.min(MAX_PREDICTION_CAMPAIGNS)));
    findings.tables.push(rival_table(&cells, "Rules on the same runs", false));
    findings.tables.push(rival_table(&cells, "Rules on as many runs in sequence: all of A, then all of B", true));
    judge(&mut findings, &cells);
    Ok(findings)
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn percent_with_interval(rate: Rate) -> String {
    let (low, high) = rate.interval();
    format!("{:.1} % ({:.1} to {:.1})", 100.0 * rate.share(), 100.0 * low, 100.0 * high)
}

/// The counts of a cell, one line for each effect and rule.
fn record(lines: &mut Vec<String>, cell: &Cell) {
    for (effect, percent) in cell.rates.effects.iter().zip(EFFECT_PERCENTS) {
        let (model, blocks) = (cell.model.name(), cell.blocks);
        let mut line = |rule: &str, found: Rate, others: String| {
            lines.push(format!("{model},{blocks},{percent},{rule},{},{},{others}", found.trials, found.hits));
        };
        line("pagefold", effect.found, format!("{},{}", effect.covered.hits, effect.equivalent.hits));
        for (rival, (same, sequence)) in Rival::ALL.iter().zip(effect.rivals.iter().zip(&effect.rivals_in_sequence)) {
            line(rival.name(), *same, ",".to_owned());
            line(&format!("{} in sequence", rival.name()), *sequence, ",".to_owned());
        }
    }
}

fn rate_table(cells: &[Cell], campaigns: u64) -> MarkdownTable {
    let mut table = MarkdownTable::new(
        format!("Findings of the analysis, {campaigns} campaigns of each row, with 95 % intervals of the rates"),
        &[
            "noise",
            "blocks",
            "A/A: false findings",
            "finds 1 %",
            "finds 2 %",
            "finds 5 %",
            "coverage of 95 % intervals",
            "A/A: equivalent",
            "1 %: falsely equivalent",
        ],
    );
    for cell in cells {
        let mut row = vec![cell.model.name().to_owned(), cell.blocks.to_string()];
        row.push(percent_with_interval(cell.rates.effects[0].found));
        row.extend(cell.rates.effects[1..].iter().map(|effect| percent(effect.found.share())));
        row.push(percent_with_interval(cell.rates.coverage()));
        row.extend(cell.rates.effects[..2].iter().map(|effect| percent(effect.equivalent.share())));
        table.rows.push(row);
    }
    table.notes.push(
        "Each block is ABBA or BAAB. A finding needs an interval that excludes 1 and a sign-flip test of at most 5 %. \
         The interval is Student's t interval of the log ratios. Coverage is over the four effects of each campaign. \
         Equivalent is \"no effect larger than 1 %\"."
            .to_owned(),
    );
    table
}

fn method_table(cells: &[Cell]) -> MarkdownTable {
    let mut head = vec!["noise".to_owned(), "blocks".to_owned()];
    head.extend(METHODS.map(|method| format!("{method:?}")));
    let head: Vec<&str> = head.iter().map(String::as_str).collect();
    let mut table = MarkdownTable::new("Coverage of 95 % intervals by method", &head);
    for cell in cells {
        let mut row = vec![cell.model.name().to_owned(), cell.blocks.to_string()];
        row.extend(cell.rates.methods.iter().map(|rate| percent(rate.share())));
        table.rows.push(row);
    }
    table
}

fn blocks_table(cells: &[Cell], campaigns: u64) -> MarkdownTable {
    let mut table = MarkdownTable::new(
        "Blocks that find an effect with a probability of 80 %, predicted; in parentheses the simulated rate at that number",
        &["noise", "deviation of a block's log ratio", "1 %", "2 %", "5 %"],
    );
    for model in RunTimeModel::ALL {
        let of_model = cells.iter().filter(|cell| cell.model == model);
        let variances: Vec<f64> = of_model.map(|cell| cell.rates.standard_deviation().powi(2)).collect();
        let deviation = (variances.iter().sum::<f64>() / variances.len() as f64).sqrt();
        let mut row = vec![model.name().to_owned(), percent(deviation)];
        for (index, effect) in EFFECT_PERCENTS.into_iter().enumerate().skip(1) {
            let needed = blocks_needed((f64::from(effect) / 100.0).ln_1p(), deviation, PowerGoal::default());
            row.push(match needed {
                // Fewer than six blocks cannot reach 5 % in the sign-flip test.
                Some(blocks) if blocks < 6 => "6 (the fewest)".to_owned(),
                Some(blocks) if blocks <= MAX_SIMULATED_BLOCKS => {
                    let rates = simulate(model, blocks, campaigns);
                    format!("{blocks} ({})", percent(rates.effects[index].found.share()))
                }
                Some(blocks) => blocks.to_string(),
                None => "over a million".to_owned(),
            });
        }
        table.rows.push(row);
    }
    table
}

fn rival_table(cells: &[Cell], title: &str, in_sequence: bool) -> MarkdownTable {
    let mut table = MarkdownTable::new(
        format!("{title}, {RIVAL_BLOCKS} blocks ({} runs of each arm)", 2 * RIVAL_BLOCKS),
        &["noise", "rule", "A/A: false findings", "finds 1 %", "finds 2 %", "finds 5 %"],
    );
    table.text_columns = 2;
    for cell in cells.iter().filter(|cell| cell.blocks == RIVAL_BLOCKS) {
        let mut add = |rule: &str, rates: [Rate; 4]| {
            let mut row = vec![cell.model.name().to_owned(), rule.to_owned()];
            row.extend(rates.map(|rate| percent(rate.share())));
            table.rows.push(row);
        };
        if !in_sequence {
            add("pagefold", cell.rates.effects.map(|effect| effect.found));
        }
        for (index, rival) in Rival::ALL.into_iter().enumerate() {
            let rates = |effect: pagefold_labs::campaigns::EffectRates| {
                if in_sequence { effect.rivals_in_sequence[index] } else { effect.rivals[index] }
            };
            add(rival.name(), cell.rates.effects.map(rates));
        }
    }
    table
}

fn judge(findings: &mut Findings, cells: &[Cell]) {
    for blocks in BLOCKS {
        let of_size = || cells.iter().filter(|cell| cell.blocks == blocks);
        let false_findings = || of_size().map(|cell| cell.rates.effects[0].found);
        let worst = false_findings().max_by(|left, right| left.share().total_cmp(&right.share())).unwrap_or_default();
        let all = false_findings().fold(Rate::default(), |mut sum, rate| {
            sum.add(rate);
            sum
        });
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{blocks} blocks: at most {} false findings in A/A over all noise, and no noise shown to exceed it",
                percent(MAX_FALSE_FINDINGS)
            ),
            measured: format!("{}; worst noise {}", percent_with_interval(all), percent_with_interval(worst)),
            met: all.share() <= MAX_FALSE_FINDINGS && worst.interval().0 <= MAX_FALSE_FINDINGS,
        });
        let equivalence = of_size().map(|cell| cell.rates.effects[1].equivalent);
        let worst = equivalence.max_by(|left, right| left.share().total_cmp(&right.share())).unwrap_or_default();
        findings.checks.push(ThresholdCheck {
            claim: format!(
                "{blocks} blocks: an effect of the margin's size is not shown to be called equivalent in more than {}",
                percent(MAX_FALSE_EQUIVALENCE)
            ),
            measured: format!("worst noise {}", percent_with_interval(worst)),
            met: worst.interval().0 <= MAX_FALSE_EQUIVALENCE,
        });
        let coverages: Vec<f64> = of_size().map(|cell| cell.rates.coverage().share()).collect();
        findings.checks.push(ThresholdCheck {
            claim: format!("{blocks} blocks: the 95 % intervals cover in 93 to 97 % under each noise"),
            measured: format!(
                "{} to {}",
                percent(coverages.iter().copied().fold(f64::INFINITY, f64::min)),
                percent(coverages.iter().copied().fold(0.0, f64::max))
            ),
            met: coverages.iter().all(|coverage| COVERAGE.contains(coverage)),
        });
    }
}
