//! `pagefold account`: the true memory footprint of processes; RSS ignores merging.
//!
//! Every figure of a process comes from its own page tables and the mapping counts of their frames. So the command
//! reads only the selected processes. `--explain` compares the whole host with the kernel's counters. Fair shares add
//! up to the frames in use only if the page tables of all processes were read. So with `--explain` it reads all other
//! processes too, but shows no rows for them.

use crate::command_line::{GlobalOptions, ProcessOptions};
use crate::{CommandOutcome, host_selection, output, progress};
use clap::{Args, ValueEnum};
use pagefold_account::decide::reconcile::{Reconciliation, reconcile};
use pagefold_account::decide::{Account, Footprint, GroupBy, MappedPages};
use pagefold_account::footprint;
use pagefold_account::footprint::FrameLedger;
use pagefold_account::text;
use pagefold_account::wire::{AccountInput, AccountReport, ReconciliationInput};
use pagefold_base::engine::is_store_mapping;
use pagefold_base::ksm::Ksm;
use pagefold_base::process::Process;
use pagefold_base::{Absent, Bytes, Pages, Reading};
use pagefold_census::results::UnscannedProcess;
use pagefold_census::{ProcessSelection, scan_scope};
use pagefold_host::{Host, ProcessHandle as Handle, observe, parse};
use pagefold_merge::split_zeros;
use pagefold_merge::split_zeros::FreedZeroPages;
use pagefold_output::wire;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  pagefold account                       the footprint of each process, exact if run by root
  pagefold account --by vm --top 50      the same by virtual machine
  pagefold account --by job --user alice by Slurm or MPI job
  pagefold account --cgroup /machine.slice --json > account.json
  pagefold account --explain             compared with the kernel's counters

It reads only page tables and counters, and changes and stops nothing. \
Without root, it estimates the figures of your own processes from the kernel's sums.";

/// Arguments of `account`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AccountArguments {
    /// Group the figures by this
    #[arg(long, value_enum, value_name = "KIND", default_value_t = GroupByArgument::Process)]
    by: GroupByArgument,
    /// Compare the account of the whole host with the kernel's counters, and explain each difference
    #[arg(long)]
    explain: bool,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema account`)
    #[arg(long)]
    json: bool,
    // Last, because its help heading applies to all options after it.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// How figures are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GroupByArgument {
    /// Single processes
    Process,
    /// Virtual machines
    Vm,
    /// Cgroups
    Cgroup,
    /// Jobs: Slurm jobs with all their steps, and MPI jobs
    Job,
    /// Steps of Slurm jobs; other jobs count as one step
    Step,
    /// Users
    User,
}

impl From<GroupByArgument> for GroupBy {
    fn from(by: GroupByArgument) -> Self {
        match by {
            GroupByArgument::Process => Self::Process,
            GroupByArgument::Vm => Self::Vm,
            GroupByArgument::Cgroup => Self::Cgroup,
            GroupByArgument::Job => Self::Job,
            GroupByArgument::Step => Self::Step,
            GroupByArgument::User => Self::User,
        }
    }
}

/// Take the account and print it.
pub fn run(options: &AccountArguments, global: &GlobalOptions) -> anyhow::Result<CommandOutcome> {
    let host = host_selection::open_host(global)?;
    let selection = host_selection::process_selection(&options.targets, global)?;
    let started = Instant::now();
    let never_stopped = AtomicBool::new(false);
    let (accounts, unscanned, reconciliation) =
        progress::run_census_with_progress(host.page_size(), &never_stopped, |_| {
            take_account(&*host, &selection, options.explain, load_freed_zeros(&*host, global))
        })?;
    host_selection::check_any_seen(&*host, !accounts.is_empty(), &selection, &unscanned, global)?;
    let report = AccountReport::from_input(&AccountInput {
        host: host.describe(),
        page_size: host.page_size(),
        group_by: options.by.into(),
        accounts: &accounts,
        unscanned: &unscanned,
        reconciliation: reconciliation.as_ref().map(|(reconciliation, processes, unscanned)| ReconciliationInput {
            reconciliation,
            processes: *processes,
            unscanned,
        }),
        seconds: started.elapsed().as_secs_f64(),
    });
    if options.json {
        output::print_stdout(&wire::to_json(&report))?;
    } else {
        output::print_stdout(&text::render(
            &report,
            options.top,
            host_selection::permission_remedy(global),
            output::stdout_style(global),
        ))?;
    }
    Ok(if report.is_incomplete() { CommandOutcome::Partial } else { CommandOutcome::Done })
}

/// The accounts of the selected processes and the processes that could not be read. With `explain`, also the comparison
/// for the whole host, the number of its processes, and its processes that could not be read.
pub type AccountResult = (Vec<Account>, Vec<UnscannedProcess>, Option<(Reconciliation, u64, Vec<UnscannedProcess>)>);

/// Load the counts of zero pages that merges freed by splitting huge pages. A recording has none.
fn load_freed_zeros(host: &dyn Host, global: &GlobalOptions) -> Reading<FreedZeroPages> {
    if global.host != "live" {
        return Err(Absent::NotOnThisKernel);
    }
    split_zeros::load_freed(host, &global.state).map_err(|error| split_zeros::absent_from_error(&error))
}

/// Account for the selected processes, and with `explain` for all others too. `freed_zeros` has the zero pages that
/// merges freed by splitting huge pages.
pub fn take_account(
    host: &dyn Host,
    selection: &ProcessSelection,
    explain: bool,
    freed_zeros: Reading<FreedZeroPages>,
) -> Result<AccountResult, pagefold_census::Error> {
    let (frames, ledger) = (footprint::check_frames_readable(host), Mutex::new(FrameLedger::new(host)));
    let reader = AccountReader { host, frames, ledger, ksm: read_ksm(host), freed_zeros };
    let (accounts, unscanned) =
        scan_scope::inspect_selected(host, selection, |handle, process| reader.account_process(handle, process))?;
    if !explain {
        return Ok((accounts, unscanned, None));
    }
    let selected_ids: BTreeSet<_> = accounts.iter().map(|account| account.process.id).collect();
    let (other_accounts, all_unscanned) =
        scan_scope::inspect_selected(host, &ProcessSelection::default(), |handle, process| {
            let is_new = !selected_ids.contains(&process.id);
            is_new.then(|| reader.account_process(handle, process)).transpose()
        })?;
    let frames = reader.ledger.into_inner().expect("no thread panicked").finish();
    let all_accounts: Vec<Account> = accounts.iter().cloned().chain(other_accounts.into_iter().flatten()).collect();
    // Read the counters right after the frames, so that they are from the same time.
    let memory = observe::memory(host).unwrap_or_else(|_| parse::meminfo(b""));
    let reconciliation = reconcile(host.page_size(), &all_accounts, &frames, &read_ksm(host), &memory);
    Ok((accounts, unscanned, Some((reconciliation, all_accounts.len() as u64, all_unscanned))))
}

/// KSM's counters, each absent where the kernel has no KSM.
fn read_ksm(host: &dyn Host) -> Ksm {
    observe::ksm(host).unwrap_or_else(|why| parse::ksm(|_| Err(why.clone())))
}

/// The data that accounts are computed from.
struct AccountReader<'h> {
    host: &'h dyn Host,
    /// Whether frames can be read.
    frames: Reading<()>,
    ledger: Mutex<FrameLedger<'h>>,
    /// KSM's counters, for the estimates.
    ksm: Ksm,
    /// Zero pages that merges freed by splitting huge pages.
    freed_zeros: Reading<FreedZeroPages>,
}

impl AccountReader<'_> {
    /// Account for a process: exactly if frames can be read, otherwise from the kernel's sums.
    fn account_process(&self, handle: &dyn Handle, process: Process) -> Reading<Account> {
        let page = self.host.page_size();
        // Read the rollup first: a process that has ended by now must be in no part of the comparison.
        let rollup = observe::rollup(handle);
        if rollup == Err(Absent::Vanished) {
            return Err(Absent::Vanished);
        }
        let footprint = match (self.read_mapped_pages(handle), rollup) {
            (Err(Absent::Vanished), _) => return Err(Absent::Vanished),
            (Ok(mapped), Ok(rollup)) => Footprint::exact(page, mapped, rollup.pss, rollup.swap, &process.ksm),
            (Ok(mapped), Err(why)) => Footprint::exact(page, mapped, Err(why.clone()), Err(why), &process.ksm),
            (Err(why), rollup) => Footprint {
                engine: self.count_engine_pages(handle),
                ..Footprint::estimated(page, &rollup?, &process.ksm, &self.ksm, why)?
            },
        };
        let zeros_by_splitting = self.count_split_zeros(handle, &process);
        Ok(Account { footprint: Footprint { zeros_by_splitting, ..footprint }, process })
    }

    /// The zero pages freed by splitting that are still free.
    fn count_split_zeros(&self, handle: &dyn Handle, process: &Process) -> Reading<Pages> {
        let freed = self.freed_zeros.as_ref().map_err(Absent::clone)?.get(&process.id).copied();
        split_zeros::count_still_free(self.host, handle, freed.unwrap_or(Pages::ZERO))
    }

    /// The pages of a process that map a store of the user-space engine, from its regions, without the frames.
    fn count_engine_pages(&self, handle: &dyn Handle) -> Reading<Pages> {
        if !observe::mapped_regions(handle)?.iter().any(|region| is_store_mapping(&region.name)) {
            return Ok(Pages::ZERO);
        }
        let stores = observe::regions(handle)?.into_iter().filter(|region| is_store_mapping(&region.name));
        let bytes = stores.map(|region| region.rss.saturating_sub(region.anonymous)).sum();
        Ok(self.host.page_size().pages_in(bytes))
    }

    /// The pages that the page tables of a process map.
    fn read_mapped_pages(&self, handle: &dyn Handle) -> Reading<MappedPages> {
        self.frames.clone()?;
        let regions = observe::regions(handle)?;
        let mapped = self.ledger.lock().expect("no thread panicked").add_process(handle, &regions)?;
        let resident: Bytes = regions.iter().map(|region| region.rss).sum();
        let found_pages = mapped.shares.pages() + mapped.zero + mapped.huge_zero + mapped.gone;
        if resident > Bytes::ZERO && found_pages == Pages::ZERO {
            // A recording may lack the pages of a process.
            return Err(Absent::Malformed("no page tables, though memory is resident".to_owned()));
        }
        Ok(mapped)
    }
}
