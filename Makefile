# Each target makes .venv when it is missing or older than what it was made from; nothing but python3 and make is needed.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test test-all chromium lint docs clean

demo: $(INSTALLED)
	$(BIN)/python train.py

# two workers with one thread each, since torch would start as many threads as there are cores in both; who is done first takes over
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# the same with a browser at hand, without which the tests of the report's page skip themselves
test-all: chromium
	$(MAKE) test

# Debian's; elsewhere any of the names in tests/chromium.py will do
chromium:
	@command -v chromium >/dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; } || \
	  echo "chromium is not here and cannot be installed: tests in a browser are skipped"

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

# into site/, which needs no network to be read
docs: .venv/.docs
	$(BIN)/python -m mkdocs build --strict

# caches of prompts and runs (data/cache, outputs) are the user's work and stay
clean:
	rm -rf .venv build dist site *.egg-info .pytest_cache .ruff_cache .hypothesis
	find blockpilot tests -name __pycache__ -prune -exec rm -rf {} +

# dflash, the reference decoder that tests compare with, comes alone: it pins older versions of what is installed
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; try: make PYTHON=python3.11")'
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --no-deps dflash==0.1.0
	touch $@

.venv/.docs: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@
