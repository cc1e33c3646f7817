//! `pagefold account`: what processes cost in truth, where RSS is blind to merging.
//!
//! Every figure of a process is known from its own page tables and the counts of the frames they name, so only the
//! chosen processes are read. The balance of `--explain` is one of the whole host: fair shares add up to the frames in
//! use, and the kernel's counters compare, only when everybody's page tables were read. So with it the others are
//! entered too, and shown in no row.

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
  pagefold account                       what each process costs, exactly if run by root
  pagefold account --by vm --top 50      the same by virtual machine
  pagefold account --by job --user alice by Slurm or MPI job
  pagefold account --cgroup /machine.slice --json > account.json
  pagefold account --explain             held against the kernel's own counters

Reads page tables and counters only; nothing is changed or stopped. \
Without root the figures of one's own processes are estimates from the kernel's sums.";

/// Arguments of `account`.
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct AccountArguments {
    /// What to sum over
    #[arg(long, value_enum, value_name = "WHAT", default_value_t = GroupByArgument::Process)]
    by: GroupByArgument,
    /// Hold the account of the whole host against the kernel's counters, and explain each difference
    #[arg(long)]
    explain: bool,
    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 12)]
    top: usize,
    /// Print JSON (see `pagefold schema account`)
    #[arg(long)]
    json: bool,
    // Last, because its heading in the help holds for all that follows.
    #[command(flatten)]
    targets: ProcessOptions,
}

/// What to sum over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum GroupByArgument {
    /// Each process by itself
    Process,
    /// Virtual machines
    Vm,
    /// Cgroups
    Cgroup,
    /// Jobs: of Slurm with all their steps, of MPI
    Job,
    /// Steps of Slurm jobs; other jobs have one
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
    let never = AtomicBool::new(false);
    let (accounts, unseen, whole) = progress::run_census_with_progress(host.page_size(), &never, |_| {
        take_account(&*host, &selection, options.explain, load_freed_zeros(&*host, global))
    })?;
    host_selection::check_any_seen(!accounts.is_empty(), &selection, &unseen, global)?;
    let report = AccountReport::from_input(&AccountInput {
        host: host.describe(),
        page_size: host.page_size(),
        group_by: options.by.into(),
        accounts: &accounts,
        unscanned: &unseen,
        reconciliation: whole.as_ref().map(|(reconciliation, processes, unseen)| ReconciliationInput {
            reconciliation,
            processes: *processes,
            unscanned: unseen,
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

/// The accounts of the chosen processes, those that were not seen, and with `explain` the comparison for the whole host
/// with the number of its processes and those not seen of them.
pub type AccountResult = (Vec<Account>, Vec<UnscannedProcess>, Option<(Reconciliation, u64, Vec<UnscannedProcess>)>);

/// What merges have noted of zeros in huge pages that they had split. A recording has no notes.
fn load_freed_zeros(host: &dyn Host, global: &GlobalOptions) -> Reading<FreedZeroPages> {
    if global.host != "live" {
        return Err(Absent::NotOnThisKernel);
    }
    split_zeros::load_freed(host, &global.state).map_err(|error| split_zeros::absent_from_error(&error))
}

/// Enter the chosen processes, and with `explain` everybody else. `noted` is what merges have noted of zeros in huge
/// pages that they had split.
pub fn take_account(
    host: &dyn Host,
    selection: &ProcessSelection,
    explain: bool,
    freed_zeros: Reading<FreedZeroPages>,
) -> Result<AccountResult, pagefold_census::Error> {
    let (frames, ledger) = (footprint::check_frames_readable(host), Mutex::new(FrameLedger::new(host)));
    let books = AccountBooks { host, frames, ledger, ksm: read_ksm(host), freed_zeros };
    let (accounts, unseen) =
        scan_scope::inspect_selected(host, selection, |handle, process| books.account_process(handle, process))?;
    if !explain {
        return Ok((accounts, unseen, None));
    }
    let entered: BTreeSet<_> = accounts.iter().map(|account| account.process.id).collect();
    let (rest, missed) = scan_scope::inspect_selected(host, &ProcessSelection::default(), |handle, process| {
        let new = !entered.contains(&process.id);
        new.then(|| books.account_process(handle, process)).transpose()
    })?;
    let frames = books.ledger.into_inner().expect("no thread panicked").finish();
    let everybody: Vec<Account> = accounts.iter().cloned().chain(rest.into_iter().flatten()).collect();
    // The counters as they are now, right after the frames.
    let memory = observe::memory(host).unwrap_or_else(|_| parse::meminfo(b""));
    let reconciliation = reconcile(host.page_size(), &everybody, &frames, &read_ksm(host), &memory);
    Ok((accounts, unseen, Some((reconciliation, everybody.len() as u64, missed))))
}

/// KSM's counters, each absent where the kernel has no KSM.
fn read_ksm(host: &dyn Host) -> Ksm {
    observe::ksm(host).unwrap_or_else(|why| parse::ksm(|_| Err(why.clone())))
}

/// Where the processes are entered.
struct AccountBooks<'h> {
    host: &'h dyn Host,
    /// Whether frames may be looked at.
    frames: Reading<()>,
    ledger: Mutex<FrameLedger<'h>>,
    /// For the estimates.
    ksm: Ksm,
    /// What merges have noted of zeros in huge pages that they had split.
    freed_zeros: Reading<FreedZeroPages>,
}

impl AccountBooks<'_> {
    /// Exactly where frames may be looked at, otherwise from the kernel's sums.
    fn account_process(&self, handle: &dyn Handle, process: Process) -> Reading<Account> {
        let page = self.host.page_size();
        // First, so that who is gone by then is in no part of the balance.
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

    /// What of the noted zeros in split huge pages is still free.
    fn count_split_zeros(&self, handle: &dyn Handle, process: &Process) -> Reading<Pages> {
        let noted = self.freed_zeros.as_ref().map_err(Absent::clone)?.get(&process.id).copied();
        split_zeros::count_still_free(self.host, handle, noted.unwrap_or(Pages::ZERO))
    }

    /// The pages of a process that map a store of the engine: what its own regions say, without the frames.
    fn count_engine_pages(&self, handle: &dyn Handle) -> Reading<Pages> {
        if !observe::mapped_regions(handle)?.iter().any(|mapped| is_store_mapping(&mapped.name)) {
            return Ok(Pages::ZERO);
        }
        let stores = observe::regions(handle)?.into_iter().filter(|region| is_store_mapping(&region.name));
        let bytes = stores.map(|region| region.rss.saturating_sub(region.anonymous)).sum();
        Ok(self.host.page_size().pages_in(bytes))
    }

    /// What the page tables of a process map.
    fn read_mapped_pages(&self, handle: &dyn Handle) -> Reading<MappedPages> {
        self.frames.clone()?;
        let regions = observe::regions(handle)?;
        let mapped = self.ledger.lock().expect("no thread panicked").add_process(handle, &regions)?;
        let resident: Bytes = regions.iter().map(|region| region.rss).sum();
        let found = mapped.shares.pages() + mapped.zero + mapped.huge_zero + mapped.gone;
        if resident > Bytes::ZERO && found == Pages::ZERO {
            // A recording need not hold the pages of every process.
            return Err(Absent::Malformed("no page tables, though memory is resident".to_owned()));
        }
        Ok(mapped)
    }
}
