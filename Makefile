# Every target sets up what it needs; `make help` lists them.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
bin := .venv/bin
export PYTHON

.PHONY: help setup demo test test-fast test-v2 test-lowest soak ops-tools browser-tools ops-test lint check-format check-lint check-types format reference gpu-check bench demo-weights clean

help: ## list the targets
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup: ## make .venv from requirements/ (about 4 GB), or do nothing if it is up to date
	@scripts/setup

demo: setup ## serve the embedded model; ARGS="--port 9000" adds flags
	@exec $(bin)/holdfast serve --demo $(ARGS)

# Four processes keep two cores busy, since engines that start and recover often wait.
test: setup ## run all tests; ARGS="-k words" adds flags
	@exec $(bin)/pytest -n 4 --no-loadscope-reorder $(ARGS)

test-fast: setup ## run the tests that start no engine
	@exec $(bin)/pytest -n 3 --no-loadscope-reorder -m "not engine" $(ARGS)

test-v2: setup ## run the tests of engines on vLLM's V2 model runner, the default on GPUs
	@exec $(bin)/python tests/support/v2_runner.py -n 3 --no-loadscope-reorder tests/engine $(ARGS)

test-lowest: setup ## run the tests that start no engine with the lowest versions that pyproject.toml allows
	@exec $(bin)/python tests/support/lowest_versions.py -n 3 --no-loadscope-reorder -m "not engine" $(ARGS)

soak: setup ## run the long proofs (hours): random requests, killed writers
	@exec $(bin)/pytest soak $(ARGS)

ops-tools: ## put Prometheus, routers and other tools of tests into .ops-tools, or do nothing if they are there
	@scripts/ops-tools

browser-tools: setup ## put what the tests of pages run into .browser-tools, or do nothing if it is there
	@scripts/browser-tools

ops-test: setup ops-tools ## run the long checks of dashboards, alerts and deployment with the real tools
	@exec $(bin)/pytest ops_tests $(ARGS)

lint: check-format check-lint check-types ## check format, lint and types

check-format: setup
	@$(bin)/ruff format --check .

check-lint: setup
	@$(bin)/ruff check .

check-types: setup
	@$(bin)/mypy

format: setup ## format the code, and fix what the linter can fix
	@$(bin)/ruff format .
	@$(bin)/ruff check --fix .

reference: setup ## write the tables of flags and metrics in docs/reference.md from the code
	@$(bin)/python scripts/reference.py

gpu-check: ## check Holdfast on this machine's GPU; PYTHON=... has torch, ARGS="--list" names the checks
	@exec $(or $(PYTHON),python3) -m gpu_check $(ARGS)

bench: setup ## run every benchmark; ARGS="--quick" tries them, ARGS="--write" writes docs/benchmarks.md
	@exec $(bin)/python benchmarks $(ARGS)

demo-weights: setup ## train weights for a demo model that answers (four and a half hours) and put them into the package; DIRECTORY=... for the checkpoint
	@OMP_NUM_THREADS=1 $(bin)/python -m demo_training train --directory $(or $(DIRECTORY),build/demo-weights)
	@OMP_NUM_THREADS=1 $(bin)/python -m demo_training export --directory $(or $(DIRECTORY),build/demo-weights)

clean: ## remove .venv, caches and build output
	rm -rf .venv .ops-tools .browser-tools build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis server/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
