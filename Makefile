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

# In an environment of its own: the packages compared with pin other versions than ours.
crosscheck:
	$(PYTHON) -m venv .venv-crosscheck
	.venv-crosscheck/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -e ".[dev,crosscheck]"
	.venv-crosscheck/bin/python -m pytest -m crosscheck

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-crosscheck .pytest_cache .mypy_cache .ruff_cache
