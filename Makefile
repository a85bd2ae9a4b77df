# Two commands set everything up on a fresh machine: `make quickstart` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The PyTorch build. Without a GPU the CPU build is much smaller: make quickstart TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.PHONY: help quickstart test test-all check format docs clean
help:
	@echo "make quickstart   install, then train the embedded model on this machine's CPU"
	@echo "make test         the test suite (under 20 minutes on 2 cores)"
	@echo "make test-all     also the long matrices (marker: slow)"
	@echo "make check        format, lint, types, import contracts, tests"
	@echo "make docs         write the generated pages again"

$(VENV)/.runtime: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(PIP) -e '.[runtime]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	$(PIP) -e '.[runtime,dev]'
	@touch $@

quickstart: $(VENV)/.runtime
	$(BIN)/p3o-launch run --preset temp_1p2 --profile cpu

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow"

# pyproject.toml leaves the slow ones out of a bare `pytest`.
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -m ""

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(MAKE) test

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: $(VENV)/.dev
	$(BIN)/python scripts/generate_fields.py
	$(BIN)/python scripts/generate_docs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
