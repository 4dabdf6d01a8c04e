# Every target sets up what it needs in .venv by itself (scripts/setup.sh); Python 3.11+, make and git are enough.
PY := .venv/bin/python
ENGINE ?= pdd
TRACE ?= agent_jan
JOBS ?= 2
ARGS ?=
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help run test test-slow check format bench nightly notebook wheel lock clean clean-venv
.PHONY: setup-run setup-dev setup-notebook

help:  ## show this list
	@echo "usage: make TARGET [NAME=value ...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'
	@echo "names:"
	@echo "  ARGS='...'   more words for the command, as in: make run ARGS='seed=1 limit.requests=50'"
	@echo "  PYTHON=...   the Python to make .venv with (default: the first of 3.13, 3.12, 3.11 found)"
	@echo "  PIP_EXTRA_INDEX_URL=...   where to take another build of torch from (see requirements/run.lock)"
	@echo "all options of a run: .venv/bin/python -m harness --help"

run: setup-run  ## the main job: ENGINE=pdd on TRACE=agent_jan
	$(PY) -m harness engine=$(ENGINE) trace=$(TRACE) $(ARGS)

test: setup-dev  ## quick tests, under 6 minutes on 2 cores; JOBS=2 processes
	@$(PY) -m pytest -m "not slow" -n $(JOBS) --dist worksteal $(ARGS); code=$$?; \
	if [ $$code -eq 5 ]; then echo "test: pytest found no test at all (wrong ARGS, or tests/ is missing)" >&2; fi; \
	exit $$code

test-slow: setup-dev  ## tests marked slow, one at a time
	@$(PY) -m pytest -m slow $(ARGS); code=$$?; \
	if [ $$code -eq 5 ]; then echo "test-slow: no test is marked slow"; exit 0; fi; exit $$code

check: setup-dev  ## lint, format, types
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

format: setup-dev  ## mend format and simple lint
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

bench: setup-run  ## speed of model, transfers and engine on this machine
	$(PY) -m benchmarks.engine $(ARGS)

nightly: setup-run  ## four policies on virtual time, compared exactly with the last time
	$(PY) -m benchmarks.nightly $(ARGS)

notebook: setup-notebook  ## run results/compare.ipynb (the file itself stays as it is)
	$(PY) -m benchmarks.notebook $(ARGS)

wheel: setup-dev  ## build dist/*.whl
	rm -rf build dist
	$(PY) -m pip wheel --disable-pip-version-check --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

lock: setup-notebook  ## write requirements/*.lock from what .venv holds
	$(PY) scripts/lock.py

clean:  ## remove builds and caches; keeps .venv and results
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find conf engines harness traces tests benchmarks scripts -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

clean-venv: clean  ## remove .venv too
	rm -rf .venv

setup-run setup-dev setup-notebook:
	@sh scripts/setup.sh $(@:setup-%=%)
