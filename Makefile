# One command each; every one sets up what it needs first, in .venv, and a second call is quick.
#   make train ARGS="--steps 20"     make test     make help

PYTHON ?= python3
JOBS ?= 3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
# Files stay with one process, the longest first: tests/conftest.py has their order.
FILES := --dist loadfile --no-loadscope-reorder
SOURCES := tessera tests $(wildcard examples benchmarks)
# Byte code of the package, once; else each process that tests makes all of it when they begin.
BYTES := $(BIN)/python -m compileall -q -j 0 tessera
# -qq: only errors. Installed in place, so that the checkout is what runs. pip would make the byte
# code of all packages, 20 s, on one core; files that no Python could read are not ours.
INSTALL := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-compile --editable
INSTALLED_BYTES := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true
PACKAGING := pyproject.toml setup.cfg requirements.txt

.NOTPARALLEL:
.PHONY: help train test test-all check bench clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 16

train: $(VENV)/run.stamp  ## train a small transformer: make train ARGS="--help"
	$(BIN)/python examples/train.py $(ARGS)

test: check  ## ruff, mypy and every test this machine can run: ARGS="-k name" selects
	@$(BYTES)
	$(BIN)/python -m pytest -q -n $(JOBS) $(FILES) $(ARGS)

test-all: check  ## and the slow ones: 72 ranks, exhaustive walks, hundreds of faults; hours
	@$(BYTES)
	TESSERA_SLOW=1 $(BIN)/python -m pytest -q -n $(JOBS) $(FILES) $(ARGS)

# mypy ends with 1 for errors of types. With 2 when its processes did not start within 3 s, as on a
# busy machine; then it checks by itself.
check: $(VENV)/test.stamp  ## ruff and mypy only
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy || { [ $$? -eq 2 ] && $(BIN)/mypy --num-workers 0; }

bench: $(VENV)/run.stamp  ## overhead and training speed; ARGS="--ours" without PyTorch
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/train_speed.py $(ARGS)

clean:  ## remove .venv, build folders and tool caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tessera $(wildcard tests examples benchmarks) -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/bin/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: tessera needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "       Install one and name it: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' cannot make virtual environments (modules venv, ensurepip)." >&2; \
	  echo "       Debian, Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "setup: new environment $(VENV) with $$($(PYTHON) -V)"
	@$(PYTHON) -m venv --clear $(VENV)

$(VENV)/run.stamp: $(PACKAGING) | $(VENV)/bin/pip
	@echo "setup: tessera and its run-time packages (requirements.txt)"
	@$(INSTALL) .
	@$(INSTALLED_BYTES)
	@touch $@

# Installs what run.stamp does and more, so it stands for both.
$(VENV)/test.stamp: $(PACKAGING) | $(VENV)/bin/pip
	@echo "setup: tessera, its run-time packages and the test tools (setup.cfg, extra 'test')"
	@$(INSTALL) '.[test]'
	@$(INSTALLED_BYTES)
	@touch $@ $(VENV)/run.stamp
