# Every target sets itself up: a virtual environment in .venv, made anew only when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint bench clean

demo: $(READY)
	$(BIN)/python examples/co2_demo.py

test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow"

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.prediction

clean:
	rm -rf $(VENV) out

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(READY)
