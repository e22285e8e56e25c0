# Everything here sets up what it needs by itself; a second run finds it done.
.DEFAULT_GOAL := help
.PHONY: help run test check-fast lint bench docs clean

BIN := .venv/bin
# Whoever runs the tests may have settings of their own.
PYTEST := HERMITCRAB_CONFIG=/dev/null $(BIN)/pytest
# `make run ON=bubblewrap CMD='id; pwd'`
ON ?= local
CMD ?= echo "hello from a session in $$PWD on $$(uname -sm)"
export CMD

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' Makefile | expand -t 20

run: ## run a command in a sandbox (ON=backend CMD=...)
	@scripts/setup run
	@echo "==> hermitcrab run --on $(ON) -- $$CMD"
	@$(BIN)/hermitcrab run --on $(ON) -- "$$CMD"

test: ## everything: style, types, all tests
	@scripts/setup test
	@$(MAKE) --no-print-directory lint
	@echo "==> pytest"
	@require="$$(scripts/setup require)" && echo "    must run here: $$require" && \
	    HERMITCRAB_REQUIRE="$$require" $(PYTEST)

check-fast: ## style, types, and the tests that take no time, on local only
	@scripts/setup dev
	@$(MAKE) --no-print-directory lint
	@HERMITCRAB_REQUIRE=local $(PYTEST) -q -m "not slow" -k "not bubblewrap"

lint:
	@scripts/setup dev
	@echo "==> ruff, mypy"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: ## measure, beside the raw lower bounds and installed peers (ARGS=--json)
	@scripts/setup run
	@$(BIN)/hermitcrab bench $(ARGS)

docs: ## regenerate the generated pages under docs/
	@scripts/setup run
	@$(BIN)/python -m hermitcrab.cli.docs

clean: ## remove what was built and installed here
	rm -rf .venv dist build src/hermitcrab/agent/bin .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
