# Everything here sets up what it needs by itself; a second run finds it done.
.DEFAULT_GOAL := help
.PHONY: help run test test-all test-microvm check-fast lint bench bench-gateway docs clean

BIN := .venv/bin
# Whoever runs the tests may have settings of their own.
PYTEST := env HERMITCRAB_CONFIG=/dev/null $(BIN)/pytest
# Most tests wait more than they work. Those of one file stay together (tests/conftest.py).
PARALLEL := -n 3
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

test: ## style, types and the tests: everything but what `make test-all` adds
	@scripts/setup test
	@$(MAKE) --no-print-directory lint
	@echo "==> pytest (the slower kinds of sandbox get a sample of the contract; make test-all asks everything)"
	@scripts/with-engines $(PYTEST) $(PARALLEL) -m "not thorough"

test-all: ## ... and the whole contract on every kind of sandbox
	@scripts/setup test
	@$(MAKE) --no-print-directory lint
	@echo "==> pytest"
	@scripts/with-engines $(PYTEST) $(PARALLEL)

test-microvm: ## the contract on real microVMs, emulated: needs no KVM, but about an hour (see scripts/microvm)
	@scripts/setup dev
	@scripts/microvm $(ARGS)

check-fast: ## style, types, and the tests that take no time, on local only
	@scripts/setup dev
	@$(MAKE) --no-print-directory lint
	@HERMITCRAB_REQUIRE=local $(PYTEST) $(PARALLEL) -q -m "not slow" -k "local or not (test_contract or docker or podman or ssh or apptainer or bubblewrap or microsandbox or e2b or vercel or daytona or modal)"

lint:
	@scripts/setup dev
	@echo "==> ruff, mypy"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

bench: ## measure, beside the raw lower bounds and installed peers (ARGS=--json)
	@scripts/setup dev
	@scripts/with-engines $(BIN)/hermitcrab bench --image hermitcrab-test \
	    --apptainer-image .engines/apptainer/images/hermitcrab-test \
	    --ssh hermitcrab-test --ssh-config .engines/ssh/config $(ARGS)

bench-gateway: ## measure the gateway, beside the same without it
	@$(MAKE) --no-print-directory bench ARGS="--only gateway --only gateway-docker --only gateway-records $(ARGS)"

docs: ## regenerate the generated pages under docs/
	@scripts/setup run
	@$(BIN)/python -m hermitcrab.cli.docs

clean: ## remove what was built and installed here
	rm -rf .venv dist build src/hermitcrab/agent/bin .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -exec rm -rf {} +
