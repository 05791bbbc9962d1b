# On a new machine, run `make demo` or `make test`. Both install what they need, and can be repeated.

VENV   ?= .venv
PYTHON ?= python3
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
WORKERS ?= 4
# The Pythons of `make release-check`; the first also tests the oldest dependencies.
PYTHONS ?= $(PYTHON)

# Else modules that have changed would be compiled again in every process of the tests.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test lint format soak launchers gpu bench docs dist release-check clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# Each stamp file records that the environment holds what its targets need.
$(VENV)/core: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	@# The warning is about a folder syncprims/ elsewhere: it says nothing about this installation.
	PYTHONWARNINGS="ignore:Editable installation" $(PIP) --editable .
	@# An editable install is not compiled, and without a writable cache it never is.
	$(BIN)/python -m compileall -q syncprims backends
	@touch $@

$(VENV)/demo: $(VENV)/core
	$(PIP) numpy scikit-learn
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

test: $(VENV)/test ## run all tests except the long loops, in parallel and in random order
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not soak and not launchers"

lint: $(VENV)/lint ## check style, types and workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pyright --pythonpath $(BIN)/python
	@# Everything public has a type. This check takes the Python that it finds on the path.
	PATH="$(abspath $(BIN)):$$PATH" PYTHONPATH=. $(BIN)/pyright --verifytypes syncprims --ignoreexternal
	$(BIN)/zizmor --quiet --offline .github

format: $(VENV)/lint ## fix style automatically
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(VENV)/test ## run the long loops of the tests
	$(BIN)/python -m pytest -m soak

launchers: $(VENV)/test ## run real jobs under SLURM and Open MPI on pretended nodes (root on Debian or Ubuntu)
	@if [ "$$(id -u)" = 0 ] && ! command -v slurmctld mpirun munged >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
	        slurm-wlm munge openmpi-bin iproute2 hostname; fi
	$(BIN)/python -m pytest -m launchers tests/launchers

gpu: $(VENV)/test ## try everything on one GPU, in at most 8 minutes: bench/GPU.md
	$(BIN)/python tests/gpu/rig.py --write

bench: $(VENV)/bench ## measure against peers: bench/RESULTS.md and pictures; continues after an interruption
	$(BIN)/python -m compileall -q syncprims backends
	$(BIN)/python bench/measure.py --resume

dist: $(VENV)/dist ## build and check sdist and wheel
	rm -rf dist build/lib build/bdist.*
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) $(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

release-check: dist ## test the wheel outside the checkout, with oldest and newest dependencies (an hour)
	PYTHONS="$(PYTHONS)" .ci/release-check

docs: $(VENV)/docs ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict

clean: ## remove all generated files
	rm -rf $(VENV) build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache examples/.cache
