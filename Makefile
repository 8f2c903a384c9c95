# `make help` lists the targets. Every target sets up what it needs; override the interpreter with PYTHON=python3.12.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
SHELL := /bin/bash
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test coverage host-tools check fmt docs test-gpu bench clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): setup.cfg pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "$(VENV): a new environment of $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); }
	@echo "$(VENV): torch, with the libraries of its build (minutes the first time, and some GB if that is CUDA's)"
	@$(BIN)/python -m pip install -q -c constraints.txt torch
	@echo "$(VENV): SageTrain, and what it needs, in the versions of constraints.txt"
	@$(BIN)/python -m pip install -q -c constraints.txt -e .
	@touch $@
	@echo "done: $(BIN)/sagetrain --help, or source $(BIN)/activate and then sagetrain --help"

$(DEV): $(STAMP)
	@echo "$(VENV): what tests, checks and docs need besides"
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[dev]'
	@touch $@

install: $(STAMP)  ## create .venv with the tested versions

quickstart: $(STAMP)  ## train, stop, resume and evaluate a small model on this machine (about 2 minutes, no GPU needed)
	$(BIN)/python launch/quickstart.py

# pytest rewrites packages that have a plugin wherever they are imported. Nothing here needs the plugin of hypothesis.
PLUGINS := --disable-plugin-autoload -p pytest_timeout -p workers -p gpu_seen
JOBS ?= 4  # On two cores: two more processes work while tests of the others wait for ranks, signals and deadlines.
test: $(DEV)  ## the whole test suite, CPU only; JOBS=0: all in one process
	@$(BIN)/python -m compileall -q -j 0 sagetrain kernels launch benchmarks tests  # once: PYTHONDONTWRITEBYTECODE may be set
	$(BIN)/python -m pytest -q --ignore=tests/gpu --durations=20 --maxfail=5 --workers $(JOBS) $(PLUGINS)

coverage: $(DEV)  ## the test suite (twice as slow) with a coverage figure of what its own process runs, not ranks
	$(BIN)/python -m pytest -q --ignore=tests/gpu --cov=sagetrain --cov-report=term:skip-covered

HOST_PACKAGES := iproute2 openssh-client openssh-server pdsh chromium chromium-driver
host-tools:  ## as root on Debian: install two hosts for tests/cluster/test_hosts.py, a browser for tests/report/test_report.py (else skipped)
	@if [ "$$(id -u)" = 0 ] && command -v apt-get && ! { command -v ip && command -v sshd && command -v pdsh && command -v chromedriver; }; then \
	    export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; \
	    { apt-get update && apt-get install -y --no-install-recommends $(HOST_PACKAGES); } || true; \
	fi > /dev/null 2>&1

check: $(DEV)  ## lint, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

fmt: $(DEV)  ## format and fix what ruff can fix
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(DEV)  ## the guides, results and key reference as a site in site/
	$(BIN)/mkdocs build -q --strict

FAST ?=
GPU_JOBS ?=
test-gpu:  ## kernel and trainer tests on all NVIDIA GPUs, with the python on PATH; FAST=1: a first pass of a quarter of them
	@python3 -m compileall -q -j 0 sagetrain kernels tests
	PYTHONPATH=.:kernels:tests/support$${PYTHONPATH:+:$$PYTHONPATH} python3 tests/support/side_by_side.py $(if $(GPU_JOBS),--processes $(GPU_JOBS)) -q --noconftest $(if $(FAST),-p first_pass) tests/gpu

bench:  ## attention benchmark on an NVIDIA GPU: checks every shape, then times it beside the peers
	PYTHONPATH=.:kernels python3 -m sagekernels.bench

clean:  ## remove the environment and build leftovers
	rm -rf $(VENV) build site *.egg-info .pytest_cache .ruff_cache .mypy_cache
