# Two commands do everything: `make pipeline` and `make test`.
PYTHON ?= python3
# pip's own choice of build; for CUDA 12.6, say: make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126" pipeline
TORCH  ?= torch==2.13.0
WORKERS ?= 2
STATE  := $(CURDIR)/.agentgym
BIN    := .venv/bin
INSTALLED := .venv/.installed

export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
# nothing is sent anywhere, nothing is written to the home directory
export DO_NOT_TRACK = 1
export DVC_NO_ANALYTICS = 1
export DVC_SITE_CACHE_DIR = $(STATE)/dvc
export MLFLOW_DISABLE_TELEMETRY = true
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION = false
export MPLCONFIGDIR = $(STATE)/matplotlib

.PHONY: install pipeline test slow ray chaos chaos-short check up down ui clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, this is {v[0]}.{v[1]}; name another with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned set into .venv (about 250 packages, 2.5 GB; minutes)"
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

pipeline: install  ## the whole job; run it again to go on where it stopped. Overrides: make pipeline ARGS="optimiser.lr=5e-4"
	@$(BIN)/python -m flows.pipeline $(ARGS)

test: install  ## the tests, two at a time; one after the other: make test WORKERS=0
	@$(BIN)/python -m pytest -m "not slow and not gpu and not ray" --numprocesses $(WORKERS) $(ARGS)

slow: install  ## what takes minutes
	@$(BIN)/python -m pytest -m "slow" $(ARGS)

ray: install  ## what starts Ray
	@$(BIN)/python -m pytest -m "ray" $(ARGS)

chaos: install  ## kill parts of a run at random times and check what is left; most of an hour, writes docs/results/faults.md
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

chaos-short: install  ## the same, one fault each of four kinds; minutes
	@$(BIN)/python benchmarks/chaos.py --short --out $(STATE)/faults.md $(ARGS)

check: install  ## format, lint, types, layers, fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory test

up: install  ## Prefect server, worker and MLflow of this project; ports: make up PREFECT_PORT=4200 MLFLOW_PORT=5000
	@$(BIN)/python -m tasks.services up $(if $(PREFECT_PORT),--prefect-port $(PREFECT_PORT)) $(if $(MLFLOW_PORT),--mlflow-port $(MLFLOW_PORT))

down: install  ## end them
	@$(BIN)/python -m tasks.services down

ui: install  ## MLflow on http://127.0.0.1:5000 until Ctrl-C
	@mkdir -p $(STATE)
	@echo "MLflow: http://127.0.0.1:$(or $(PORT),5000)"
	@exec $(BIN)/mlflow server --backend-store-uri sqlite:///$(STATE)/mlflow.db --artifacts-destination $(STATE)/mlflow-artifacts \
		--host 127.0.0.1 --port $(or $(PORT),5000) --workers 1

clean:  ## forget all runs (the environment in .venv stays)
	@if test -e .agentgym/services.json; then $(BIN)/python -m tasks.services down; fi
	rm -rf .agentgym outputs dvc.lock .dvc/cache .dvc/tmp .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
