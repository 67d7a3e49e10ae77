# One word per task. `make` alone lists them.

VENV := .venv
BIN := $(VENV)/bin
# Root's PATH in a container may lack where nft, nsd and unbound are.
export PATH := $(PATH):/usr/sbin:/sbin

.PHONY: help run test lint suite deep bench parts clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST)

run: $(VENV)/.run ## start the proxy on 127.0.0.1:5353 and [::1]:5353 with the demo settings
	@cat config/demo.d/NEXT
	@exec $(BIN)/dnsproxy run --config config/demo.yaml

test: parts lint suite ## the whole gate: what CI runs

lint: $(VENV)/.dev ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

suite: $(VENV)/.dev ## the tests, on stock asyncio and on uvloop
	DNSPROXY_LOOP=asyncio $(BIN)/python -m pytest -q
	DNSPROXY_LOOP=uvloop $(BIN)/python -m pytest -q

deep: $(VENV)/.dev ## the tests with 100,000 examples for every property
	DNSPROXY_DEEP=1 $(BIN)/python -m pytest -q --timeout=0

bench: $(VENV)/.run ## what a query costs, beside other forwarders: twenty minutes, as root (BENCH="--quick" and others)
	$(BIN)/python bench/run.py --write docs/performance.md $(BENCH)

parts:
	@tools/test-parts

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist

# The environment to run in, and the one to develop in; made again when the project's settings change.
$(VENV)/.run: pyproject.toml
	@echo "Making the environment in $(VENV) ..."
	@python=$$(tools/python) && "$$python" -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[fast]'
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --group dev
	@touch $@
