# make demo   kill a training twice, restart it, compare every number with an uninterrupted run
# make test   the tests
# The first call makes .venv, with the versions of constraints.txt.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
PYTEST_WORKERS ?= 2

# One thread per process: the tests start many, and threads that share two cores only wait for each other.
test test-slow test-lowest test-package demo recordings: export OMP_NUM_THREADS := 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-lowest test-package lint docs recordings bench bench-stores clean

help:
	@echo "make demo       kill a training twice, restart it, compare every number with an uninterrupted run"
	@echo "make test       the tests (test-slow: the long ones)"
	@echo "make test-lowest  whole runs with the oldest supported Lightning"
	@echo "make test-package  wheel and sdist: what is in them; the wheel at work in an empty environment"
	@echo "make lint       ruff and mypy"
	@echo "make docs       the documentation as HTML, into build/docs (recordings: its pictures of terminals, anew)"
	@echo "make bench      what saves, idle steps and restarts cost, beside Lightning's own ways and the limits of this"
	@echo "                machine: ten minutes, into runs/bench (ARGS=--quick: one and a half; ARGS=--help)"
	@echo "make bench-stores  uploads and downloads beside those of s3fs, against a real S3 server: a minute"
	@echo "make clean      remove caches and builds (not $(VENV))"

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "constraints.txt needs Python 3.11 or newer: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv </dev/null; \
	  else \
	    echo "$(PYTHON) cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv" >&2; \
	    exit 1; \
	  fi; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[test,docs,cli,s3,plot,safetensors]'
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist worksteal

# The oldest supported Lightning, in an environment of its own.
LOWEST := .venv-lowest
$(LOWEST)/.stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(LOWEST)
	grep -vE '^(lightning|pytorch-lightning)==' constraints.txt >$(LOWEST)/constraints.txt
	$(LOWEST)/bin/python -m pip install -q -c $(LOWEST)/constraints.txt lightning==2.5.5 -e '.[test,cli]'
	@touch $@

test-lowest: $(LOWEST)/.stamp
	$(LOWEST)/bin/python -m pytest -m "not slow" -n $(PYTEST_WORKERS) --dist worksteal -p no:cacheprovider \
	  tests/trainer/test_exact.py tests/trainer/test_boundaries.py tests/trainer/test_lifecycle.py \
	  tests/trainer/test_plain_compatibility.py tests/trainer/test_beside.py tests/format tests/unit/test_plugin.py \
	  tests/guards/test_preemption.py tests/guards/test_divergence.py tests/drill/test_scripts.py \
	  'tests/sharded/test_exact.py::test_exact[fsdp-sharded-adamw]'

# What `pip install` gives a user.
test-package: $(STAMP)
	$(BIN)/python -m pytest tests/packaging

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(STAMP)
	$(BIN)/python -m sphinx -W --keep-going -q -b html -d build/doctrees docs build/docs
	@echo "build/docs/index.html"

recordings: $(STAMP)
	$(BIN)/python docs/record.py

bench: $(STAMP)
	$(BIN)/python -m tests.benchmarks $(ARGS)

bench-stores: $(STAMP)
	$(BIN)/python -m tests.benchmarks.stores $(ARGS)

clean:
	rm -rf build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache .coverage*
	find . \( -path ./$(VENV) -o -path ./$(LOWEST) \) -prune -o -name __pycache__ -type d -exec rm -rf {} +
