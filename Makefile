# Everything that is done to this repository, by name. `make` lists it.
#
# LOCKED=--locked   refuse to touch Cargo.lock, as continuous integration does
# ARGS=...          arguments of the program that `bench`, `fuzz` and `aarch64-live` start

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
demo: setup ## Merge memory of real programs on this machine and show what that saved: guests as root, else a simulation
	labs/demo.sh

# Documentation tests come first and integration tests last, so that the last line is a result of tests that ran: the
# unit tests of a binary and the documentation tests of a crate may well be none. The test runner keeps what tests that
# passed have printed, and with it what they skipped, to itself: .ci/skipped tells it. The status is cargo's (pipefail).
.PHONY: test
test: setup setup-watch ## Run every test; as root the live ones too (real KSM, other processes, guests)
	( trap "echo 'tests: all done'" EXIT; \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --doc && \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --lib --bins -- --show-output && \
	$(CARGO) build $(LOCKED) --workspace --all-features --examples --lib && \
	$(CARGO) test $(LOCKED) --workspace --all-features --no-fail-fast --test '*' -- --show-output ) | .ci/skipped

.PHONY: soak
soak: setup ## Enrol and withdraw busy programs thousands of times, a database under load among them (as root; minutes)
	labs/soak.sh
	$(CARGO) build $(LOCKED) --workspace --all-features --lib --bins
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) -p pagefold --all-features --test killed
	$(CARGO) build $(LOCKED) --release -p pagefold-engine --examples
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) --release -p pagefold-engine --test members random
	PAGEFOLD_SOAK=1 $(CARGO) test $(LOCKED) --release -p pagefold-engine --lib protocol

.PHONY: bench
bench: ## Measure what the documentation claims (minutes; wants a quiet machine)
	$(CARGO) run $(LOCKED) --release -p pagefold-benchmarks -- $(ARGS)

.PHONY: bench-merge
bench-merge: setup ## Measure what merging brings and costs under all policies (as root; an hour and more; ARGS: sections)
	labs/setup-bench.sh
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-labs -p pagefold-benchmarks
	target/release/pagefold-benchmarks merge $(ARGS)

.PHONY: bench-daemon
bench-daemon: setup ## Measure the daemon beside guests that come and go, look-alikes, hostile programs, on a quiet host, at a memory limit
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-labs -p pagefold-benchmarks
	target/release/pagefold-benchmarks daemon $(ARGS)

.PHONY: bench-hera
bench-hera: setup ## Measure the user engine: a stand-in for HERA in all modes of memory, and throughput (as root; an hour and a half)
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-engine -p pagefold-benchmarks
	$(CARGO) build $(LOCKED) --release -p pagefold-engine --example member
	$(MAKE) install-library DESTDIR=$(CURDIR)/target/installed PREFIX=
	labs/hera/build.sh target/hera target/installed/lib
	target/release/pagefold-benchmarks merge throughput hera $(ARGS)

# gxhash, one of the hashes that are compared, compiles only where AES instructions may be used everywhere.
ifeq ($(shell grep -m1 -cw aes /proc/cpuinfo),1)
bench: export RUSTFLAGS := $(strip $(RUSTFLAGS) -C target-feature=+aes)
endif

PREFIX ?= /usr/local
LIBDIR ?= $(PREFIX)/lib
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
# Where what is installed was built: PROFILE=dev for a build in a fraction of the time.
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
test-deb: deb setup ## Install the package in a fresh Debian that systemd has started, in a guest, and try it (as root; minutes)
	.ci/debian mmdebstrap cpio lintian
	labs/deb/test.sh target/deb/pagefold_*.deb

.PHONY: test-slurm
test-slurm: setup ## Run jobs under a real Slurm of one node with the scripts of deploy/slurm (as root; minutes)
	.ci/debian munge procps slurm-client slurmctld slurmd
	$(CARGO) build $(LOCKED) --release -p pagefold -p pagefold-preload -p pagefold-adopt -p pagefold-labs
	labs/slurm.sh target/release

.PHONY: check-kubernetes
check-kubernetes: ## Validate what is in deploy/kubernetes against the schemas of Kubernetes 1.37 (by a package of PyPI)
	.ci/debian python3-venv
	python3 -m venv target/kubernetes
	target/kubernetes/bin/pip install --quiet kubernetes-validate==1.37.0
	target/kubernetes/bin/kubernetes-validate --strict deploy/kubernetes/daemonset.yaml deploy/kubernetes/namespace.yaml

.PHONY: lint
lint: style deny ## Check formatting, lints, scripts, licences and duplicate dependencies

.PHONY: style
style: ## The quick half of lint: formatting, clippy, shell scripts
	$(CARGO) fmt --all --check
	$(CARGO) clippy $(LOCKED) --workspace --all-targets --all-features -- -D warnings
	.ci/shell

.PHONY: deny
deny: ## The other half: licences, duplicates, sources and, where reachable, advisories
	.ci/deny

.PHONY: docs
docs: ## Build the API documentation; a broken link is an error
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc $(LOCKED) --workspace --no-deps --all-features

.PHONY: fuzz
fuzz: ## Fuzz the parsers and the calls of the user-space engine (ARGS: seconds for each target, 60 without)
	fuzz/run.sh $(ARGS)

.PHONY: sanitize
sanitize: ## Run the C example and tests of the user-space engine under AddressSanitizer and ThreadSanitizer (minutes)
	LOCKED="$(LOCKED)" .ci/sanitize

# Without system calls of ours there is little that it could run: the decisions, and the index in memory of its own.
.PHONY: miri
miri: ## Run what is pure of the user-space engine in Miri (minutes; needs a nightly toolchain with miri)
	$(CARGO) +nightly miri test $(LOCKED) --target-dir target/miri -p pagefold-engine --lib -- decide::
	$(CARGO) +nightly miri test $(LOCKED) --target-dir target/miri -p pagefold-engine --lib -- index:: layout::tests::lines

.PHONY: fixtures
fixtures: ## Record the hosts in fixtures/recordings anew (as root; boots a guest), and what is printed of them
	fixtures/record.sh
	UPDATE_GOLDEN=1 $(CARGO) test $(LOCKED) -p pagefold --test golden

.PHONY: aarch64
aarch64: ## Check that it compiles for 64-bit Arm, and run the tests of the portable crates under emulation
	LOCKED="$(LOCKED)" .ci/aarch64

.PHONY: aarch64-live
aarch64-live: ## Run the tests of injection in an emulated 64-bit Arm machine (a quarter of an hour; ARGS: of cargo test)
	LOCKED="$(LOCKED)" labs/arm64.sh $(ARGS)

# Root installs what is missing (with new package lists where those of a fresh machine are empty or old), and a failure
# is a failure. Others use what is there: a test that misses something says `skipped: ` and what it needs, and `make test`
# lists that in the end.
.PHONY: setup
setup: ## Install what the live tests and the demo need (QEMU, a guest kernel) into the system and .cache/
	@if [ "$$(id -u)" -eq 0 ]; then \
		labs/setup.sh || { apt-get update --quiet=2 && labs/setup.sh; }; \
	else \
		labs/setup.sh || echo "setup is incomplete: run 'sudo make setup' once to have it all"; \
		echo "not root: tests that drive KSM, read others' memory or look at page frames will be skipped"; \
	fi

.PHONY: setup-watch
setup-watch: ## Install what the tests of the web page and the metrics need (headless Chromium, promtool, tmux)
	@if [ "$$(id -u)" -eq 0 ]; then \
		labs/setup-watch.sh || { apt-get update --quiet=2 && labs/setup-watch.sh; }; \
	else \
		labs/setup-watch.sh || echo "setup-watch is incomplete: tests that miss something will say that they are skipped"; \
	fi

.PHONY: clean
clean: ## Remove everything that was built or downloaded
	$(CARGO) clean
	rm -rf .cache fuzz/target
