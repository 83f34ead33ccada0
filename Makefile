# `make help` lists the targets. Each sets up what it needs, and is quick the second time.

VENV ?= .venv
SGLANG_VENV ?= .venv-sglang
ARGS ?=
SEED ?= 0
NUM ?= 200

PYTHON_BIN := $(VENV)/bin/python
READY := $(VENV)/.epd-ready

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-sglang check lint bench-slice train-tiny-vl eval-tiny-vl clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "  VENV=$(VENV) is the environment; ARGS=... goes to the command"

$(READY): pyproject.toml scripts/setup.sh
	@scripts/setup.sh $(VENV)

setup: $(READY) ## make the virtual environment and install everything into it

demo: $(READY) ## one question about one picture through three stages (ARGS="--keep --seed 3")
	@$(PYTHON_BIN) -m epd demo $(ARGS)

test: $(READY) ## run the tests (ARGS="tests/cli -k doctor")
	@$(PYTHON_BIN) -m pytest $(ARGS)

test-sglang: ## run the tests of engines with the real SGLang on a CPU (its own .venv-sglang)
	@scripts/setup-sglang.sh $(SGLANG_VENV)
	@EPD_TEST_ENGINE=sglang $(SGLANG_VENV)/bin/python -m pytest tests/contract $(ARGS)

lint: $(READY) ## style and strict types
	@$(PYTHON_BIN) -m ruff check
	@$(PYTHON_BIN) -m ruff format --check
	@$(PYTHON_BIN) -m pyright --pythonpath $(PYTHON_BIN)

check: lint test ## lint, strict types and tests: what CI runs

bench-slice: $(READY) ## TTFT and tokens/s of the three stages against plain transformers
	@$(PYTHON_BIN) -m epd.bench.slice $(ARGS)

train-tiny-vl: $(READY) ## train the bundled model
	@$(PYTHON_BIN) -m examples.tiny_vl.train $(ARGS)

eval-tiny-vl: $(READY) ## ask the bundled model NUM fresh questions of seed SEED
	@$(PYTHON_BIN) -m examples.tiny_vl.evaluate --seed $(SEED) --num $(NUM) $(ARGS)

clean: ## remove the environment and caches
	rm -rf $(VENV) $(SGLANG_VENV) build dist .pytest_cache .ruff_cache .hypothesis
	find epd encoders examples tests -name __pycache__ -type d -prune -exec rm -rf {} +
