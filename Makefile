# `make demo` and `make test` each set up everything they need on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow lint crosscheck clean

demo: $(VENV)/.installed
	$(BIN)/ergoflow demo

test: $(VENV)/.installed lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu and not crosscheck"

test-slow: $(VENV)/.installed
	$(BIN)/python -m pytest -m "slow"

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

crosscheck: $(VENV)/.installed
	$(BIN)/pip install --quiet --constraint constraints.txt -e ".[crosscheck]"
	$(BIN)/python -m pytest -m crosscheck

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
