# Targets to build, test, measure and install Pagefold. `make` lists them.
#
# LOCKED=--locked   do not change Cargo.lock, as in continuous integration
# ARGS=...          arguments of the program that the target starts (`bench`, `fuzz`, `aarch64-live`, ...)

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

CARGO ?= cargo
LOCKED ?=
ARGS ?=

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: setup ## Merge memory of real programs on this machine and print the savings: guests as root, else a simulation
	labs/demo.sh

# Integration tests run last, so that the last line is the result of tests that ran: a binary may have no unit tests, and
# a crate no documentation tests. The test runner hides the output of passed tests, including their `skipped: ` lines;
# with --show-output, .ci/skipped filters and lists them. The exit status is cargo's (pipefail).
.PHONY: test
test: setup setup-watch ## Run all tests; as root also the live tests (real KSM, other processes, guests)
	( trap "echo 'tests: all done'" EXIT; \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --doc && \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --lib --bins -- --show-output && \
	$(CARGO) build $(LOCKED) --workspace --all-features --examples --lib && \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --test '*' -- --show-output ) | .ci/skipped

.PHONY: soak
soak: setup ## Enroll and unenroll busy programs, including a database under load, thousands of times (as root; minutes)
	labs/soak.sh
	$(CARGO) build $(LOCKED) --workspace --all-features --lib --bins
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) -p pagefold --all-features --test killed
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) -p pagefold-sim --all-features --test simulation --test live_ksmd
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) -p pagefold-labs --all-features --test guests numa_apply
	$(CARGO) build $(LOCKED) --release -p pagefold-engine --examples
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) --release -p pagefold-engine --test members random
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) --release -p pagefold-engine --lib protocol

.PHONY: lab
lab: ## Repeat an experiment of docs/experiments.md and write its report (as root; minutes; ARGS: its name)
	$(CARGO) build $(LOCKED) -p pagefold
	labs/experiments/run $(ARGS)

.PHONY: bench
bench: ## Measure the performance that the documentation claims (minutes; needs an idle machine)
	$(CARGO) run $(LOCKED) --release -p pagefold-benchmarks -- $(ARGS)

.PHONY: bench-merge
bench-merge: setup ## Measure savings and cost of merging under all policies (as root; more than an hour; ARGS: sections)
	labs/setup-bench.sh
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-labs -p pagefold-benchmarks
	target/release/pagefold-benchmarks merge $(ARGS)

.PHONY: bench-daemon
bench-daemon: setup ## Measure the daemon with starting and ending guests, large guests, similar programs, hostile programs, an idle host, a memory limit
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-labs -p pagefold-benchmarks
	target/release/pagefold-benchmarks daemon $(ARGS)

.PHONY: bench-gang
bench-gang: setup ## Measure `vcpu gang` in an emulated machine (half an hour)
	$(CARGO) build $(LOCKED) --release -p pagefold --features gang
	$(MAKE) bench ARGS="gang $(ARGS)"

.PHONY: bench-hera
bench-hera: setup ## Measure the user engine: a model of HERA in all memory modes, and throughput (as root; an hour and a half)
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-engine -p pagefold-benchmarks
	$(CARGO) build $(LOCKED) --release -p pagefold-engine --example member
	$(MAKE) install-library DESTDIR=$(CURDIR)/target/installed PREFIX=
	labs/hera/build.sh target/hera target/installed/lib
	target/release/pagefold-benchmarks merge throughput hera $(ARGS)

# gxhash, one of the compared hashes, compiles only if the compiler may use AES instructions everywhere.
ifeq ($(shell grep -m1 -cw aes /proc/cpuinfo),1)
bench: export RUSTFLAGS := $(strip $(RUSTFLAGS) -C target-feature=+aes)
endif

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
# Cargo profile of the installed build. PROFILE=dev builds in a fraction of the time.
PROFILE ?= release
BUILT = target/$(if $(filter dev,$(PROFILE)),debug,$(PROFILE))

.PHONY: install
install: ## Install pagefold under PREFIX (/usr/local): program, libraries to preload, unit, configuration, man pages
	$(CARGO) build $(LOCKED) --profile $(PROFILE) -p pagefold -p pagefold-preload -p pagefold-adopt
	BUILT=$(BUILT) PREFIX=$(PREFIX) SYSCONFDIR=$(SYSCONFDIR) UNITDIR=$(UNITDIR) deploy/install "$(DESTDIR)"

.PHONY: install-library
install-library: ## Install libpagefold.so, its header, pkg-config file and man page under PREFIX (/usr/local)
	$(CARGO) build $(LOCKED) --profile $(PROFILE) -p pagefold-engine
	install -D -m 644 $(BUILT)/libpagefold_engine.so $(DESTDIR)$(LIBDIR)/libpagefold.so.0
	ln -sf libpagefold.so.0 $(DESTDIR)$(LIBDIR)/libpagefold.so
	install -D -m 644 crates/engine/include/pagefold.h $(DESTDIR)$(PREFIX)/include/pagefold.h
	install -D -m 644 crates/engine/man/pagefold.3 $(DESTDIR)$(PREFIX)/share/man/man3/pagefold.3
	version=$$($(CARGO) pkgid -p pagefold-engine | sed 's/.*[#@]//'); \
	sed -e 's|@PREFIX@|$(PREFIX)|' -e 's|@LIBDIR@|$(LIBDIR)|' -e "s|@VERSION@|$$version|" crates/engine/pagefold.pc.in | \
	install -D -m 644 /dev/stdin $(DESTDIR)$(LIBDIR)/pkgconfig/pagefold.pc

.PHONY: deb
deb: ## Build the Debian packages into target/deb (installs debhelper as root)
	.ci/debian debhelper dpkg-dev
	CARGO=$(CARGO) LOCKED=$(LOCKED) PROFILE=$(PROFILE) deploy/debian/build

.PHONY: test-deb
test-deb: deb setup ## Test the package in a guest with a fresh Debian booted by systemd (as root; minutes)
	.ci/debian mmdebstrap cpio lintian
	labs/deb/test.sh target/deb/pagefold_*.deb

.PHONY: test-slurm
test-slurm: setup ## Run jobs under a real Slurm of one node with the scripts of deploy/slurm (as root; minutes)
	.ci/debian munge procps slurm-client slurmctld slurmd
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-preload -p pagefold-adopt -p pagefold-labs
	labs/slurm.sh target/release

.PHONY: check-kubernetes
check-kubernetes: ## Validate deploy/kubernetes against the schemas of Kubernetes 1.37 (with a package of PyPI)
	.ci/debian python3-venv
	python3 -m venv target/kubernetes
	target/kubernetes/bin/pip install --quiet kubernetes-validate==1.37.0
	target/kubernetes/bin/kubernetes-validate --strict deploy/kubernetes/daemonset.yaml deploy/kubernetes/namespace.yaml

# The model has the same machines, with the locks of a guest's kernel.
.PHONY: vcpu-pictures
vcpu-pictures: setup ## Draw the pictures of docs/vcpu-gang.md again: four policies in an emulated machine, and in the model (minutes)
	$(CARGO) build $(LOCKED) -p pagefold -p pagefold-labs --all-features --bins
	rm -rf target/policies
	target/debug/pagefold-lab record-policies target/policies
	cd target/policies && ../debug/pagefold vcpu map "EEVDF without PLE" --beside "EEVDF with PLE" \
		--beside "spread, throttled yield" --beside gang --from 20ms --for 60ms --svg ../../docs/pictures/vcpu-scheduler-4.svg
	target/debug/pagefold vcpu sim dbench-8x20 --kernel today --policy plain,ple,throttled,gang --vms 2 --vcpus 4 --cpus 4 \
		--svg docs/pictures/vcpu-model-4.svg

# The compiled program is in the source tree, so that no build needs clang. The path of the tree does not enter it.
.PHONY: gang-object
gang-object: ## Compile the scheduler of `vcpu gang` again after a change of its source (installs clang-19 as root)
	.ci/gang-object

.PHONY: lint
lint: style deny docs ## Check formatting, lints, scripts, licenses, duplicate dependencies and links of the API documentation

.PHONY: style
style: ## The quick part of lint: formatting, clippy, shell scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(LOCKED) --workspace --all-targets --all-features -- -D warnings
	.ci/shell

.PHONY: deny
deny: ## The other part of lint: licenses, duplicates, sources and, if reachable, advisories
	.ci/deny

.PHONY: docs
docs: ## Build the API documentation; broken links are errors
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LOCKED) --workspace --no-deps --all-features

.PHONY: fuzz
fuzz: ## Fuzz the parsers and the calls of the user engine (ARGS: seconds for each target; default 60)
	fuzz/run.sh $(ARGS)

.PHONY: sanitize
sanitize: ## Run the C example and tests of the user engine under AddressSanitizer and ThreadSanitizer (minutes)
	LOCKED="$(LOCKED)" .ci/sanitize

# Miri cannot run the engine's system calls: only tests of the decisions, of the index in private memory, and a parser.
.PHONY: miri
miri: ## Run tests of the user engine that make no system calls in Miri (minutes; needs a nightly toolchain with miri)
	$(CARGO) +nightly miri test $(LOCKED) --target-dir target/miri -p pagefold-engine --lib -- decide::
	$(CARGO) +nightly miri test $(LOCKED) --target-dir target/miri -p pagefold-engine --lib -- index:: own_mappings::tests::maps_lines

.PHONY: fixtures
fixtures: ## Record the hosts in fixtures/recordings again (as root; boots a guest), and update the golden outputs
	fixtures/record.sh
	UPDATE_GOLDEN=1 $(CARGO) test $(LOCKED) -p pagefold --test golden
	UPDATE_GOLDEN=1 $(CARGO) test $(LOCKED) -p pagefold-doctor --test verdicts

.PHONY: aarch64
aarch64: ## Check that Pagefold compiles for 64-bit Arm, and run the tests of the portable crates under emulation
	LOCKED="$(LOCKED)" .ci/aarch64

.PHONY: aarch64-live
aarch64-live: ## Run the injection tests in an emulated 64-bit Arm machine (a quarter of an hour; ARGS: arguments of cargo test)
	LOCKED="$(LOCKED)" labs/arm64.sh $(ARGS)

# Root installs missing packages, and updates the package lists if that fails, as on a fresh machine. A second failure is
# an error. Without root, nothing is installed: a test that lacks a package prints `skipped: ` and the reason, and
# `make test` lists these lines at its end.
.PHONY: setup
setup: ## Install the needs of the live tests and the demo (QEMU, a guest kernel) into the system and .cache/
	@if [ "$$(id -u)" -eq 0 ]; then \
		labs/setup.sh || { apt-get update --quiet=2 && labs/setup.sh; }; \
	else \
		labs/setup.sh || echo "setup is incomplete: run 'sudo make setup' once to complete it"; \
		echo "not root: tests that control KSM, or read page frames or memory of other processes, will be skipped"; \
	fi

.PHONY: setup-watch
setup-watch: ## Install the needs of the web page and metrics tests (headless Chromium, promtool, tmux)
	@if [ "$$(id -u)" -eq 0 ]; then \
		labs/setup-watch.sh || { apt-get update --quiet=2 && labs/setup-watch.sh; }; \
	else \
		labs/setup-watch.sh || echo "setup-watch is incomplete: tests that lack a package will be skipped with a message"; \
	fi

.PHONY: clean
clean: ## Remove all build results and downloads
	$(CARGO) clean
	rm -rf .cache fuzz/target
