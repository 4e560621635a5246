# One word each; CI uses the same. Everything is set up in .venv by whatever target needs it first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready

.PHONY: help demo test check unit crash kills teeth grid damage bench gpu wheel clean

help: ## what there is
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

$(STAMP): requirements/test.txt pyproject.toml
	@echo "setting up $(VENV) (once; about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -r requirements/test.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: $(STAMP) ## train, kill, resume, compare: two minutes
	$(BIN)/relight demo

test: check unit ## all that CI runs

check: $(STAMP) ## lint, types, layers, docs
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

unit: $(STAMP) ## the tests, without the long proofs
	$(BIN)/python -m pytest

crash: $(STAMP) ## 100,000 crash points
	$(BIN)/python -m relight.testing.crash --points 100000

kills: $(STAMP) ## 5,000 SIGKILLs by syscall
	$(BIN)/python -m relight.testing.kills --count 5000

teeth: $(STAMP) ## remove each fsync, link and check once: something must fail
	$(BIN)/python -m relight.testing.teeth

grid: $(STAMP) ## exact resume over the whole grid
	$(BIN)/python -m pytest -m grid tests/exact

damage: $(STAMP) ## every bit of every record
	$(BIN)/python -m pytest -m slow tests/damage tests/hostile

bench: $(STAMP) ## against torch.save, in one run
	$(BIN)/python benchmarks/run.py

gpu: $(STAMP) ## what needs CUDA
	$(BIN)/python -m pytest -m gpu

wheel: $(STAMP) ## build, and import what was built
	rm -rf dist && $(BIN)/python -m hatchling build -t wheel
	rm -rf build/venv && $(PYTHON) -m venv --system-site-packages build/venv
	build/venv/bin/python -m pip install --quiet --disable-pip-version-check dist/*.whl
	build/venv/bin/relight --version

clean: ## remove what was made
	rm -rf $(VENV) dist build .pytest_cache .ruff_cache .mypy_cache .hypothesis
