# Each target is one script or one cargo call; `make` lists them.

PREFIX ?= /usr/local

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-lab bench bench-lab bench-vmm fuzz setup build install check fmt doc clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## set up, build, and fork a running machine four ways
	@scripts/demo.sh

test: ## run every test and check, as CI does
	@scripts/test.sh

test-all: ## also run the long tests
	@KEIKI_TEST_ALL=1 scripts/test.sh

test-lab: ## test the kvm engine with real Linux guests, even without hardware support
	@scripts/test.sh setup build template lab-all

bench: ## measure this machine, into bench.json
	@scripts/bench.sh

bench-lab: ## measure what forking saves, with real guests on engine kvm, into bench-lab.json
	@scripts/test.sh setup build template
	@scripts/lab.sh bench

bench-vmm: ## measure the monitor's fork with a tiny guest, into bench-vmm.json
	@KEIKI_BENCH_VMM=$(CURDIR)/bench-vmm.json cargo bench --locked -p keiki-vmm --bench monitor

fuzz: ## run the fuzz targets for a minute each; for longer runs: scripts/fuzz.sh -s SECONDS
	@scripts/fuzz.sh

setup: ## install what building and running needs (Debian, root)
	@scripts/setup.sh

build: setup ## build keiki, keiki-vmm and keiki-guest into target/keiki/
	@scripts/build.sh

install: build ## install keiki to PREFIX/bin, the rest to PREFIX/lib/keiki
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' scripts/install.sh

check: ## run the static checks only
	@scripts/test.sh fmt tidy deny clippy

fmt: ## format the code
	@cargo fmt --all

doc: ## build the API documentation of all crates
	@RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps

clean: ## remove build output, and the data of the demo and the tests
	@scripts/clean.sh
