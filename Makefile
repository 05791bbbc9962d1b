# Two commands for a fresh machine: `make demo` and `make test`. Both can be repeated at once.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 4
# Those that `make release-check` tries, the first with the oldest dependencies.
PYTHONS ?= $(PYTHON)

.DEFAULT_GOAL := help
.PHONY: help demo test lint format soak bench docs dist release-check clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Each stamp says that an environment holds what its target needs.
$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --editable .
	@# An editable install is not compiled, and where nothing may be cached it never would be.
	$(BIN)/python -m compileall -q syncprims backends
	@touch $@

$(VENV)/demo: $(VENV)/core
	$(PIP) scikit-learn
	@touch $@

$(VENV)/test: $(VENV)/core
	$(PIP) --group test
	@touch $@

$(VENV)/lint: $(VENV)/test
	$(PIP) --group lint
	@touch $@

$(VENV)/bench: $(VENV)/test
	$(PIP) --group bench
	@touch $@

$(VENV)/dist: $(VENV)/core
	$(PIP) --group dist
	@touch $@

$(VENV)/docs: $(VENV)/core
	$(PIP) --group docs
	@touch $@

demo: $(VENV)/demo ## train on real data: four ranks, file backend, no GPU, no torch
	$(BIN)/syncprims run -n 4 examples/digits.py

test: $(VENV)/test ## all tests, in parallel and in random order
	$(BIN)/python -m pytest -n $(WORKERS) -m "not soak"

lint: $(VENV)/lint ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/lint ## mend what can be mended by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(VENV)/test ## the long loops
	$(BIN)/python -m pytest -m soak

bench: $(VENV)/bench ## measure beside the peers: bench/RESULTS.md and pictures; goes on if broken off
	$(BIN)/python -m compileall -q syncprims backends
	$(BIN)/python bench/measure.py --resume

dist: $(VENV)/dist ## build sdist and wheel, and check them
	rm -rf dist build/lib build/bdist.*
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

release-check: dist ## test the wheel elsewhere: with the oldest and the newest dependencies (an hour)
	PYTHONS="$(PYTHONS)" .ci/release-check

docs: $(VENV)/docs ## build the documentation into site/, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

clean: ## remove what was made
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache examples/.cache
