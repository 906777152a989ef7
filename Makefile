# The first run of each target makes .venv and installs what that target needs. If $(PYTHON) already has torch
# and Triton, they are used and not downloaded: see .ci/environment.py.
PYTHON ?= python3
# Test processes at a time for the tests without a GPU.
JOBS ?= 2

VENV := .venv
PY := $(VENV)/bin/python
SETUP := .ci/environment.py pyproject.toml
HAS_GPU := $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'

# So that a clone works uninstalled too: without network the editable install may not be possible.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

.NOTPARALLEL:
.PHONY: help install demo test lint docs performance clean

help:
	@echo 'make demo     a real language model on our kernels (no GPU needed: about four minutes)'
	@echo 'make test     the tests; those that need a GPU run where there is one'
	@echo 'make lint     ruff and mypy'
	@echo 'make docs     API pages in build/docs'
	@echo 'make performance  the tables in docs/ from perf/results/'
	@echo 'make install  .venv with everything for the above'
	@echo 'make clean    remove .venv and everything built'

install:
	$(PYTHON) .ci/environment.py test perf lint --optional engines --stamp $(VENV)/.demo $(VENV)/.test $(VENV)/.lint

$(VENV)/.demo: $(SETUP)
	$(PYTHON) .ci/environment.py --optional engines --stamp $@

$(VENV)/.test: $(SETUP)
	$(PYTHON) .ci/environment.py test perf --optional engines --stamp $@

$(VENV)/.lint: $(SETUP)
	$(PYTHON) .ci/environment.py lint perf --stamp $@

$(VENV)/.docs: $(SETUP)
	$(PYTHON) .ci/environment.py docs --stamp $@

# Without a GPU the kernels run on CPU tensors in Triton's interpreter.
demo: $(VENV)/.demo
	@if $(HAS_GPU); then $(PY) -m tritonattn demo; else TRITON_INTERPRET=1 $(PY) -m tritonattn demo; fi

test: $(VENV)/.test
	OMP_NUM_THREADS=1 $(PY) -m pytest -m 'not gpu' -n $(JOBS)
	@if $(HAS_GPU); then $(PY) -m pytest -m gpu; else echo 'No GPU here: the tests marked gpu were not run.'; fi

lint: $(VENV)/.lint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

docs: $(VENV)/.docs
	$(PY) -m pdoc --docformat numpy --output-directory build/docs tritonattn

# From the committed results; a test compares.
performance: $(VENV)/.test
	$(PY) -m tritonattn report perf/results/peers-h200 --markdown docs/performance.md
	$(PY) -m tritonattn report perf/results/blockops-h200 --markdown docs/performance_blockops.md
	$(PY) -m tritonattn report perf/results/host-h200 --markdown docs/performance_host.md
	$(PY) -m tritonattn report perf/results/policy-h200 --markdown docs/performance_policy.md

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
