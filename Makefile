# Each target does all the set-up it needs; every one can be called again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VERL_VENV := $(or $(MOOPD_VERL_VENV),.venv-verl)
TORCH ?= torch==2.13.0
export OMP_NUM_THREADS ?= 1
export DO_NOT_TRACK := true
export PREFECT_SERVER_ANALYTICS_ENABLED := false

.PHONY: run test setup smoke mini learn fault lint bench verl-env verl-test clean help

help:            ## these lines
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*##/ ##/'

setup: $(VENV)/.ready

# torch first and by exact version: a plain requirement would pull a CUDA build of several GB.
$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check "$(TORCH)"
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

run: setup       ## the main job: every stage at scale tiny, then the report
	$(BIN)/moopd run --scale tiny

smoke: setup     ## the same chain in a minute or two
	$(BIN)/moopd run --scale smoke

mini: setup      ## real questions, a real 135M model (MODEL=folder DATA=folder)
	$(BIN)/moopd run --scale mini --set model.path="$(MODEL)" --set data.path="$(DATA)"

test: setup lint ## lint, types, import rules and all tests but the slow ones
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

learn: setup     ## three training seeds on fresh test worlds: does it learn? (about an hour and a half)
	$(BIN)/python benchmarks/learn.py

fault: setup     ## kill the real process at 20 seeded points and compare the results
	$(BIN)/python benchmarks/fault.py

bench: setup     ## ratios: rollouts, statistics, retrieval, orchestration
	$(BIN)/python benchmarks/rollouts.py
	$(BIN)/python benchmarks/statistics.py
	$(BIN)/python benchmarks/retrieval.py

verl-env:        ## the environment of the distributed trainer, in .venv-verl
	bash scripts/verl_env.sh

# The interpreter is named, so that a missing one fails the tests and does not skip them.
verl-test: setup verl-env  ## the real verl trainer on the CPU: Stage I, freeze, Stage II (CI, too)
	MOOPD_VERL_PYTHON="$(abspath $(VERL_VENV))/bin/python" \
		$(BIN)/python -m pytest -m slow --durations=8 tests/trainers/verl_plugin

clean:           ## forget all results (the environment stays)
	rm -rf data/home data/learn data/fault data/orchestration
