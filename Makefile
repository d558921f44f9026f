# Two commands are enough: `make demo` and `make test`. Each sets up what it needs on a fresh clone.
PYTHON ?= python3
BIN := .venv/bin
PIP_FLAGS := --quiet --disable-pip-version-check
HYPOTHESIS_JOBS ?= 2
# The oldest Python that is here and starts: one of pyenv may lie outside of the PATH, or stand in it and not start. The
# oldest releases have no wheels for 3.12.
OLDEST_PYTHON ?= $(shell for python in python3.10 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.10.*/bin/python python3.11 \
	$${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.11.*/bin/python; do "$$python" -c "" 2>/dev/null && echo "$$python" && break; done)
OLDEST_TESTS ?= tests/plan tests/size tests/serve tests/step tests/integrations/huggingface tests/integrations/accelerate \
	tests/integrations/lightning

# Tests of one file stay with one worker until another has nothing left to do: servers and browsers start once. The
# tests start some hundred interpreters, each of which would compile the package anew if bytecode were not kept.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest --numprocesses $(HYPOTHESIS_JOBS) --dist worksteal

KERAS_TESTS ?= tests/integrations/keras src/batchwright/integrations/keras

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-oldest test-keras check lint types tests bench docs wheel house clean

help: ## show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-11s %s\n", $$1, $$2 }'

setup: .venv/.ready ## create .venv with everything the other targets need

# Debian packages that some tests use: a browser and Node.js for pages, a data set of images. Where they cannot be installed, those
# tests are skipped and say so.
.venv/.system:
	@mkdir -p .venv
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		command -v node >/dev/null || apt-get install -y -qq nodejs >/dev/null 2>&1 || echo "nodejs is not installed"; \
		command -v chromium >/dev/null || apt-get install -y -qq chromium >/dev/null 2>&1 || echo "chromium is not installed"; \
		[ -d /usr/share/datasets/fashion-mnist ] || apt-get install -y -qq dataset-fashion-mnist >/dev/null 2>&1 \
			|| echo "dataset-fashion-mnist is not installed"; \
	fi
	@touch $@

# Groups of dependencies need pip 25.1. The stamp keeps later runs from installing anything again. dynabatch goes without
# its dependencies, which are in the group: by its metadata it would bring GPU libraries that nothing here uses.
.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	$(BIN)/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable . --group dev
	$(BIN)/python -m pip install $(PIP_FLAGS) --no-deps dynabatch==0.2.23
	@touch $@

demo: .venv-demo/.ready ## train one model five ways on the standard library; one page has the verdict (2 minutes)
	.venv-demo/bin/python -m batchwright demo

# Small, so that the first minute is short: torch, NumPy and what they need. pip shows what it fetches.
.venv-demo/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	.venv-demo/bin/python -m pip install --disable-pip-version-check --constraint constraints.txt --editable . --group demo
	@touch $@

# Types are checked on one core while tests start on the other.
test: lint ## everything CI runs: lint, types, tests, doctests, README blocks
	@$(MAKE) --no-print-directory --jobs=2 types tests

lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.ready
	$(BIN)/mypy

tests: .venv/.ready .venv/.system
	$(PYTEST)

check: lint types .venv/.system ## the same with many more random cases, and whole grids where `make test` runs a part
	HYPOTHESIS_PROFILE=check $(PYTEST)

# Not part of `make test`: another Python and another torch, about 3 GB from PyPI. Where a release has no torch.nn.attention.varlen
# or no FSDP2, the tests of these are skipped.
test-oldest: .venv-oldest/.ready ## the same on the oldest releases that pyproject.toml allows, as far as they apply
	.venv-oldest/bin/pytest --numprocesses $(HYPOTHESIS_JOBS) $(OLDEST_TESTS)

.venv-oldest/.ready: pyproject.toml constraints-oldest.txt
	@[ -n "$(OLDEST_PYTHON)" ] || { echo "test-oldest needs Python 3.10 or 3.11; install one, or set OLDEST_PYTHON"; exit 1; }
	$(OLDEST_PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	.venv-oldest/bin/python -m pip install $(PIP_FLAGS) --constraint constraints-oldest.txt --editable . --group oldest
	@touch $@

# An environment apart: TensorFlow and JAX want other releases of some packages than the rest. Keras chooses its backend
# when it is imported, so every backend is a run of its own.
test-keras: .venv-keras/.ready ## the tests of the Keras integration on TensorFlow, torch and JAX
	KERAS_BACKEND=tensorflow .venv-keras/bin/pytest $(KERAS_TESTS)
	KERAS_BACKEND=torch .venv-keras/bin/pytest $(KERAS_TESTS)
	KERAS_BACKEND=jax .venv-keras/bin/pytest $(KERAS_TESTS)

.venv-keras/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-keras
	.venv-keras/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	.venv-keras/bin/python -m pip install $(PIP_FLAGS) --constraint constraints.txt --editable . --group keras
	@touch $@

bench: .venv-bench/.ready ## measure the planner beside its peers, three distributions; QUICK=1 takes half a minute after the install
	.venv-bench/bin/python benchmarks/planning.py $(if $(QUICK),--quick)

# The second list goes without dependencies: by their metadata they would bring GPU libraries that nothing here uses.
.venv-bench/.ready: pyproject.toml benchmarks/requirements.txt benchmarks/requirements-no-deps.txt
	$(PYTHON) -m venv .venv-bench
	.venv-bench/bin/python -m pip install $(PIP_FLAGS) --requirement benchmarks/requirements.txt
	.venv-bench/bin/python -m pip install $(PIP_FLAGS) --no-deps --requirement benchmarks/requirements-no-deps.txt
	.venv-bench/bin/python -m pip install $(PIP_FLAGS) --no-deps --editable .
	@touch $@

# An environment of its own, with nothing of the package: docstrings are read as text.
docs: .venv-docs/.ready ## build the site into site/; every warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

.venv-docs/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-docs
	.venv-docs/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	.venv-docs/bin/python -m pip install $(PIP_FLAGS) --group docs
	@touch $@

wheel: .venv-wheel/.ready ## build sdist and wheel into dist/, install the wheel beside NumPy only, and check it
	.venv-wheel/bin/python tools/check_wheel.py

.venv-wheel/.ready: pyproject.toml
	$(PYTHON) -m venv .venv-wheel
	.venv-wheel/bin/python -m pip install $(PIP_FLAGS) --upgrade "pip>=25.1"
	.venv-wheel/bin/python -m pip install $(PIP_FLAGS) --group wheel
	@touch $@

house: .venv/.ready ## print the table of the house: how the package is cut into files, and which rules break
	$(BIN)/python tools/house.py

clean: ## remove environments, caches and the demo's page
	rm -rf .venv .venv-bench .venv-demo .venv-docs .venv-keras .venv-oldest .venv-wheel demo_out site build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
