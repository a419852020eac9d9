# d2amp-ext. Every target does all of its set-up, in a virtual environment of this checkout.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
# Test files are shared out among processes, one for each core and four at most. WORKERS= is one process.
WORKERS ?= -n auto --maxprocesses 4 --dist loadfile
BENCHMARKS ?= benchmarks/step_overhead.py benchmarks/monitor_overhead.py

PY := $(VENV)/bin/python
# Each stamp is written when its step is done: a set-up that was stopped goes on where it was.
MADE := $(VENV)/.d2amp-venv
READY := $(VENV)/.d2amp-ready
SETUP_SOURCES := setup.py pyproject.toml d2amp_ext/setup_detectron2.py $(wildcard d2amp_ext/installer/*.py)

# Made again: an environment whose Python is gone. Set up again: one of a checkout that was moved.
ifneq ($(shell $(PY) -c "print('runs')" 2>/dev/null),runs)
.PHONY: $(MADE)
endif
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

.PHONY: help setup demo test soak bench clean distclean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a detector on real images, evaluate it, show the result (set-up included)"
	@echo "make test       run the tests (set-up included); ARGS='-k step' picks some"
	@echo "make soak       run the tests that take many minutes"
	@echo "make bench      run the measurements in benchmarks/"
	@echo "make setup      only the set-up: $(VENV) with torch, Detectron2 and this package"
	@echo "make clean      remove what builds and tests left; distclean removes $(VENV) too"
	@echo
	@echo "PYTHON=python3.12 picks the Python that $(VENV) is made with (3.10 or newer; now: $(PYTHON)). A torch and a"
	@echo "torchvision that it imports are used; else pip installs them, under its own settings (PIP_INDEX_URL ...)."

setup: $(READY)

demo: $(READY)
	$(VENV)/bin/d2amp demo $(ARGS)

test: export OMP_NUM_THREADS = 1
test: $(READY)
	$(PY) -m pytest tests -q -m "not soak" $(WORKERS) $(ARGS)

soak: export OMP_NUM_THREADS = 1
soak: $(READY)
	$(PY) -m pytest tests -q -m soak $(ARGS)

bench: export OMP_NUM_THREADS = 1
bench: $(READY)
	@set -e; for script in $(BENCHMARKS); do echo "$(PY) $$script $(ARGS)"; $(PY) $$script $(ARGS); done

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis
	find d2amp_ext configs tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(MADE):
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 10))" || { \
	  echo "d2amp-ext needs Python 3.10 or newer; $(PYTHON) is: $$($(PYTHON) --version 2>&1)"; \
	  echo "Name another one, as in: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m d2amp_ext.setup_detectron2 --make-venv $(VENV)
	@touch $@

$(READY): $(SETUP_SOURCES) $(MADE)
	$(PY) -m pip install -e ".[test]"
	$(PY) -m d2amp_ext.setup_detectron2
	@echo "$(CURDIR)" > $@
