# kvcellar: the verbs. `make` alone lists them.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
# Files of tests run side by side: an engine's start is imports, one core in three processes in turn.
JOBS ?= 2
PYTEST := $(PY) -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
BOOTSTRAP ?= $(shell command -v python3.11 || command -v python3)

.PHONY: help setup setup-sources format check unit e2e test demo bench bench-gpu test-gpu quality docs clean

help: ## list the verbs
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: ## make .venv and .stack: CPU builds of torch and vLLM, a small real model, the tools
	@$(BOOTSTRAP) scripts/setup.py

setup-sources: ## also unpack the Python sources of the other vLLM releases that we support
	@$(BOOTSTRAP) scripts/setup.py --sources

format: setup ## put the code into shape
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

check: setup ## format, lint, types, import contracts, shape; no test runs an engine here
	@echo "== ruff format"; $(PY) -m ruff format --check .
	@echo "== ruff check";  $(PY) -m ruff check .
	@echo "== mypy";        $(PY) -m mypy
	@echo "== imports";     $(VENV)/bin/lint-imports --no-cache
	@echo "== shape";       $(PY) -m pytest -q --no-header tests/test_shape.py

unit: setup ## every test that starts no engine and looks at no other vLLM release
	@$(PYTEST) -m "not e2e and not sources"

e2e: setup-sources ## the tests that run real vLLM, and those on the sources of other releases
	@$(PYTEST) -m "e2e or sources"

test: setup-sources check ## everything that CI runs; the last line is the summary
	@$(PYTEST)

demo: setup ## real vLLM, a small model, a long prefix: what a hit is worth (some minutes)
	@$(PY) scripts/demo.py

bench: setup ## measure copies, lookups and TTFT beside their ceilings
	@$(PY) scripts/bench.py

test-gpu: ## on a machine with a GPU: prove copies, engines that share it, and faults (PARTS=…)
	@$(or $(wildcard $(PY)),python3) scripts/test_gpu.py $(PARTS)

quality: setup ## what int8 does to a real model's answers, beside fp8 and bf16's own noise
	@OMP_NUM_THREADS=1 PYTHONPATH=src $(PY) -W ignore scripts/quality.py

bench-gpu: ## on a machine with a GPU: copies, and TTFT beside vLLM alone and the peers (ARGS=…)
	@PYTHONPATH=src:$(PYTHONPATH) $(or $(wildcard $(PY)),python3) scripts/bench_gpu.py $(ARGS)

docs: setup ## write the generated pages; check links, commands and the journey
	@$(PY) scripts/docs_config.py
	@$(PY) -m pytest -q tests/test_docs.py tests/test_journey.py tests/config/test_docs.py

clean: ## remove what make setup and the tools made
	@rm -rf .venv .stack .hypothesis .mypy_cache .pytest_cache .ruff_cache .import_linter_cache build dist
