# Two commands do everything: `make demo` and `make test`. Both set the machine up first.
RIDEALONG_VENV ?= .venv
export RIDEALONG_VENV
BIN := $(RIDEALONG_VENV)/bin
ARGS ?=

.PHONY: demo test test-faults test-harnesses lint setup bench

demo: setup
	$(BIN)/ridealong demo $(ARGS)

test: setup lint
	$(BIN)/python -m pytest $(ARGS)

# The sidecar killed 200 times under load.
test-faults: setup
	RIDEALONG_KILLS=200 $(BIN)/python -m pytest tests/sidecar/test_faults.py -s $(ARGS)

# Real agent programs from npm and PyPI (needs Node.js 20), in .harnesses; rewrites docs/harnesses.md.
test-harnesses: setup
	$(BIN)/python -m tests.harnesses.install
	$(BIN)/python -m pytest tests/harnesses -m harness --write-table $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: setup
	$(BIN)/python -m tests.bench.proxies $(ARGS)
	$(BIN)/python -m tests.bench.shards
	$(BIN)/python -m tests.bench.trainer

setup:
	@deploy/setup.sh
