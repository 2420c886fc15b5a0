# Two commands do everything: `make demo` and `make test`. Both set the machine up first.
RIDEALONG_VENV ?= .venv
export RIDEALONG_VENV
BIN := $(RIDEALONG_VENV)/bin
ARGS ?=

.PHONY: demo test lint setup bench

demo: setup
	$(BIN)/ridealong demo $(ARGS)

test: setup lint
	$(BIN)/python -m pytest $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m tests.bench.sidecar
	$(BIN)/python -m tests.bench.trainer

setup:
	@deploy/setup.sh
