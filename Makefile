# Everything here is one script or one cargo call; `make` lists it.

PREFIX ?= /usr/local

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-lab bench bench-lab bench-vmm fuzz setup build install check fmt doc clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: ## set up, build, and fork a running machine four ways
	@scripts/demo.sh

test: ## every test and gate; what CI runs
	@scripts/test.sh

test-all: ## the long tests too
	@KEIKI_TEST_ALL=1 scripts/test.sh

test-lab: ## the kvm engine with real Linux guests, also where there is no hardware for them
	@scripts/test.sh setup build template lab-all

bench: ## measure this machine into bench.json
	@scripts/bench.sh

bench-lab: ## measure what forking saves with real guests of our monitor, into bench-lab.json
	@scripts/test.sh setup build template
	@scripts/lab.sh bench

bench-vmm: ## measure our monitor's fork, with a guest of a few bytes, into bench-vmm.json
	@KEIKI_BENCH_VMM=$(CURDIR)/bench-vmm.json cargo bench --locked -p keiki-vmm --bench monitor

fuzz: ## feed the fuzz targets for a minute each, guided by coverage; longer: scripts/fuzz.sh -s SECONDS
	@scripts/fuzz.sh

setup: ## install what building and running needs (Debian, root)
	@scripts/setup.sh

build: setup ## keiki and keiki-guest into target/keiki/
	@scripts/build.sh

install: build ## keiki to PREFIX/bin, its guest agent to PREFIX/lib/keiki
	@PREFIX='$(PREFIX)' DESTDIR='$(DESTDIR)' scripts/install.sh

check: ## the gates without the tests
	@scripts/test.sh fmt tidy deny clippy

fmt: ## format the code
	@cargo fmt --all

doc: ## the API documentation of all crates
	@RUSTDOCFLAGS='-D warnings' cargo doc --locked --workspace --no-deps

clean: ## remove what was built, and the data of demo and tests
	@scripts/clean.sh
