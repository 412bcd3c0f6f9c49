# Every target sets itself up: a virtual environment in .venv, made anew only when the requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
RUNTIME := $(VENV)/.runtime
MINIMUM := .venv-minimum
GUESTS := .venv-guests
COVERED := calibration estimators/columns layers likelihoods processes runtime scores

.PHONY: demo test test-slow test-minimum test-guests coverage lint bench docs build-check image-requirements clean
unexport PYTHONDONTWRITEBYTECODE  # every process that a test starts would compile the package anew

# The demonstration needs what the library needs, and statsmodels for its CO2 series: no development tools.
demo: $(RUNTIME)
	$(BIN)/dropbayes demo --out out

# Each process takes one half of the tests in their order, so that a fixture of many tests is made once, and the one that
# is done first takes some of the other's. Hypothesis tries the same examples each time; `pytest` alone tries new ones.
test: $(READY) lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal -m "not slow" --hypothesis-profile=ci --durations=25

test-slow: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow --durations=25

# Lines and branches of packages that need no training, reached by their own tests alone: 94 % when this was written.
coverage: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "not slow" $(addprefix tests/,$(COVERED)) \
	  $(addprefix --cov=dropbayes.,$(subst /,.,$(COVERED))) --cov-branch --cov-report=term-missing:skip-covered --cov-fail-under=93

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python -m benchmarks.prediction

docs: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet -b html docs docs/_build/html
	@echo "Open docs/_build/html/index.html"

# An old package may use what its newer dependencies deprecate: that is no error of ours.
test-minimum: $(MINIMUM)/.ready
	OMP_NUM_THREADS=1 $(MINIMUM)/bin/python -m pytest -q -n 2 --dist worksteal -m "not slow" --ignore=tests/test_docs.py \
	  -W ignore::DeprecationWarning

# Frameworks warn about themselves and each other; their own log lines and files stay in a temporary folder.
test-guests: $(GUESTS)/.ready
	OMP_NUM_THREADS=1 $(GUESTS)/bin/python -m pytest -q tests/guests

build-check: $(READY)
	$(BIN)/python -m pytest -q -m slow tests/test_packaging.py

# What the Dockerfile installs, every file with its hash, and torch apart: another build of it may be wanted. Needs uv.
HASHED := uv --no-config pip compile --quiet --universal --python-version 3.12 --constraint constraints.txt --no-annotate \
  --generate-hashes --custom-compile-command "make image-requirements"
image-requirements: $(READY)
	echo torch > $(VENV)/.torch
	$(HASHED) $(VENV)/.torch --output-file requirements-torch.txt
	echo hatchling | $(HASHED) pyproject.toml - --extra serve --excludes $(VENV)/.torch --output-file requirements-image.txt

clean:
	rm -rf $(VENV) $(MINIMUM) $(GUESTS) out build dist docs/_build docs/api docs/gallery docs/sg_execution_times.rst

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(RUNTIME) $(READY)

$(RUNTIME): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable . statsmodels
	touch $(RUNTIME)

$(MINIMUM)/.ready: pyproject.toml constraints-minimum.txt
	test -x $(MINIMUM)/bin/python || $(PYTHON) -m venv $(MINIMUM)
	$(MINIMUM)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-minimum.txt \
	  --editable '.[plot,hf,optimise,conformal,serve,dask,experiments,test]'
	touch $@

$(GUESTS)/.ready: pyproject.toml
	test -x $(GUESTS)/bin/python || $(PYTHON) -m venv $(GUESTS)
	$(GUESTS)/bin/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)" \
	  --editable '.[plot,hf,guests,test]'
	touch $@
