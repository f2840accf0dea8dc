# Every target sets up what it needs in .venv, from requirements.lock.
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
# Spinning OpenMP threads slow each other down where cores are few or shared.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: help install demo test test-all gpu-check lint reproduce-all clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

install: .venv/installed  ## set up .venv with the locked dependencies and mptrain itself

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mptrain needs Python 3.11 or newer; name one with make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

demo: install  ## a ResNet on real pictures in FP32, BF16 and FP16 with three loss scales, and the table (5 minutes)
	$(BIN)/mptrain -m +recipe=resnet precision=fp32,bf16 results=results/demo
	$(BIN)/mptrain -m +recipe=resnet precision=fp16 scale=1,128,dynamic results=results/demo
	$(BIN)/mptrain compare results/demo

test: install  ## the test suite (under 15 minutes on 2 cores)
	$(BIN)/python -m pytest -q

test-all: install  ## the test suite with its slow tests
	$(BIN)/python -m pytest -q -m "not gpu"

gpu-check: install  ## what only a GPU can tell: tests, speed, memory and energy of every recipe, into results/gpu (9 minutes)
	$(BIN)/python scripts/gpu_check.py

lint: install  ## style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

reproduce-all: install  ## every run behind the paper's tables and figures at small size, and the verdicts (2 hours on 2 cores)
	$(BIN)/mptrain reproduce all

clean:  ## remove .venv and everything that runs left, except committed results
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis results/runs results/demo results/sweeps
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
