//! The command line. Each command is a module of `command`; what they share is here.
//!
//! Exit status: 0 done, 1 the verdict is no, 2 usage or failure, 3 partial: something was not seen or not put back, and
//! the output says what.

#![forbid(unsafe_code)]

mod arguments;
mod command;
mod config;
#[cfg(test)]
mod faults;
mod output;
mod progress;
mod source;

use arguments::{Arguments, Command};
use clap::Parser;
use command::daemon::control::Request;
use std::process::ExitCode;

/// How a command ended, short of failing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Done,
    VerdictNo,
    Partial,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(&arguments) {
        Ok(Outcome::Done) => ExitCode::SUCCESS,
        Ok(Outcome::VerdictNo) => ExitCode::from(1),
        Ok(Outcome::Partial) => ExitCode::from(3),
        Err(error) if output::is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pagefold: {error:#}");
            ExitCode::from(command::recover::status(&error))
        }
    }
}

fn run(arguments: &Arguments) -> anyhow::Result<Outcome> {
    // Before there are threads. What `run` starts is to see of cgroups what it would see without Pagefold. Where it is
    // not permitted, limits are unknown, and said to be so.
    if !matches!(arguments.command, Command::Run(_)) {
        let _ = pagefold_linux::enter_initial_cgroup_namespace();
    }
    match &arguments.command {
        Command::Census(options) => command::census::run(options, &arguments.global),
        Command::Record(options) => command::record::run(options, &arguments.global),
        Command::Doctor(options) => command::doctor::run(options, &arguments.global),
        Command::Account(options) => command::account::run(options, &arguments.global),
        Command::Merge(options) => command::merge::run(options, &arguments.global),
        Command::Run(options) => command::run::run(options, &arguments.global),
        Command::Daemon(options) => command::daemon::run(options, &arguments.global),
        Command::Status(options) => command::daemon::show(options, &arguments.global),
        Command::Top(options) => command::top::run(options, &arguments.global),
        Command::Report(options) => command::report::run(options, &arguments.global),
        Command::Pause => command::daemon::tell(Request::Pause, &arguments.global),
        Command::Resume => command::daemon::tell(Request::Resume, &arguments.global),
        Command::Enrol(which) => command::daemon::tell(which.enrol(), &arguments.global),
        Command::Withdraw(which) => command::daemon::tell(which.withdraw(), &arguments.global),
        Command::Policy(options) => command::policy::run(options, &arguments.global),
        Command::Recover(options) => command::recover::run(options, &arguments.global),
        Command::Config(options) => command::config::run(options, &arguments.global),
        Command::Unmerge(options) => command::unmerge::run(options, &arguments.global),
        Command::Engine(options) => command::engine::run(options, &arguments.global),
        Command::Schema(options) => command::schema::run(options),
        Command::Completions(options) => command::completions::run(options),
        Command::Man(options) => command::man::run(options),
    }
}
