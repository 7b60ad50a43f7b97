# Everything starts here: `make run` talks to the embedded pod, `make test` proves it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NATIVE := $(wildcard shared/native/*.c shared/native/*.h shared/native/build.py)

.PHONY: help setup run test check bench clean
help:
	@echo "make setup   virtual environment with everything the pod needs, native code built"
	@echo "make run     start the embedded pod and its chat endpoint (Ctrl-C stops it)"
	@echo "make test    all gates and all tests"
	@echo "make check   format, lint, types, import rules, budgets"
	@echo "make bench   measure the embedded pod"

setup: $(VENV)/.run

$(VENV)/bin/python:
	@.ci/prerequisites $(PYTHON)
	$(PYTHON) -m venv $(VENV)

# the native module is built by the installation, so its sources belong to the stamp
$(VENV)/.run: pyproject.toml setup.py $(NATIVE) | $(VENV)/bin/python
	@.ci/prerequisites $(PYTHON)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev,oracle]'
	@touch $@

run: $(VENV)/.run
	$(BIN)/k3 up

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q tests/arch

test: check
	$(BIN)/python -m pytest

bench: $(VENV)/.run
	$(BIN)/k3 bench pod

clean:
	rm -rf $(VENV) build *.egg-info shared/_native*.so .mypy_cache .ruff_cache .pytest_cache
