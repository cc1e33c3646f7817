//! The command line. Each command is a module of `command`; shared code is here.
//!
//! Exit status: 0 done, 1 negative verdict, 2 usage error or failure, 3 partial: something could not be read or could
//! not be undone, and the output names it.

#![forbid(unsafe_code)]

mod command;
mod command_line;
mod config;
mod host_selection;
#[cfg(test)]
mod injected_faults;
mod output;
mod progress;
mod stop_signal;

use clap::Parser;
use command::daemon::control_socket::ControlRequest;
use command_line::{CommandLine, PagefoldCommand};
use std::process::ExitCode;

/// The result of a command that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CommandOutcome {
    Done,
    NegativeVerdict,
    Partial,
}

fn main() -> ExitCode {
    let mut arguments = CommandLine::parse();
    arguments.global.state = host_selection::state_directory(&arguments.global);
    match run_command(&arguments) {
        Ok(CommandOutcome::Done) => ExitCode::SUCCESS,
        Ok(CommandOutcome::NegativeVerdict) => ExitCode::from(1),
        Ok(CommandOutcome::Partial) => ExitCode::from(3),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold: {error:#}");
            ExitCode::from(command::recover::exit_status(&error))
        }
    }
}

fn run_command(arguments: &CommandLine) -> anyhow::Result<CommandOutcome> {
    // Must run before any thread starts. Not for `run`: its program must see the same cgroups as without Pagefold.
    // Without permission, memory limits are unknown, and the commands report that.
    if !matches!(arguments.command, PagefoldCommand::Run(_)) {
        let _ = pagefold_linux::enter_initial_cgroup_namespace();
    }
    match &arguments.command {
        PagefoldCommand::Census(options) => command::census::run(options, &arguments.global),
        PagefoldCommand::Record(options) => command::record::run(options, &arguments.global),
        PagefoldCommand::Doctor(options) => command::doctor::run(options, &arguments.global),
        PagefoldCommand::Numa(options) => command::numa::run(options, &arguments.global),
        PagefoldCommand::Ab(options) => command::ab::run(options, &arguments.global),
        PagefoldCommand::Vcpu(options) => command::vcpu::run(options, &arguments.global),
        PagefoldCommand::Sim(options) => command::sim::run(options, &arguments.global),
        PagefoldCommand::Tune(options) => command::tune::run(options, &arguments.global),
        PagefoldCommand::Account(options) => command::account::run(options, &arguments.global),
        PagefoldCommand::Merge(options) => command::merge::run(options, &arguments.global),
        PagefoldCommand::Run(options) => command::run::run(options, &arguments.global),
        PagefoldCommand::Daemon(options) => command::daemon::run(options, &arguments.global),
        PagefoldCommand::Status(options) => command::daemon::show_status(options, &arguments.global),
        PagefoldCommand::Top(options) => command::top::run(options, &arguments.global),
        PagefoldCommand::Report(options) => command::report::run(options, &arguments.global),
        PagefoldCommand::Pause => command::daemon::send_control_request(ControlRequest::Pause, &arguments.global),
        PagefoldCommand::Resume => command::daemon::send_control_request(ControlRequest::Resume, &arguments.global),
        PagefoldCommand::Enroll(which) => {
            command::daemon::send_control_request(which.enroll_request(), &arguments.global)
        }
        PagefoldCommand::Unenroll(which) => {
            command::daemon::send_control_request(which.unenroll_request(), &arguments.global)
        }
        PagefoldCommand::Policy(options) => command::policy::run(options, &arguments.global),
        PagefoldCommand::Recover(options) => command::recover::run(options, &arguments.global),
        PagefoldCommand::Config(options) => command::config::run(options, &arguments.global),
        PagefoldCommand::Unmerge(options) => command::unmerge::run(options, &arguments.global),
        PagefoldCommand::Engine(options) => command::engine::run(options, &arguments.global),
        PagefoldCommand::Schema(options) => command::schema::run(options),
        PagefoldCommand::Completions(options) => command::completions::run(options),
        PagefoldCommand::Man(options) => command::man::run(options),
    }
}
