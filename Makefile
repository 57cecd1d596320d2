# Every target sets itself up in .venv; it needs only python3 (3.11 or newer) and make.

PYTHON ?= python3
VENV   := .venv
# An existing environment with the dependencies, for use without a network: make test-gpu ENV=/opt/venv
ENV    ?=
BIN    := $(or $(ENV),$(VENV))/bin
READY  := $(if $(ENV),,$(VENV)/ready)
# Which of the examples `make demo` and `make demo-bulk` run: magika or embedding.
EXAMPLE ?= magika
# Where the demo of magika looks for files to classify; empty: the virtual environment itself.
FOLDER ?=
# Passed on to pytest and to the benchmark: make test ARGS='-k batcher'
ARGS   ?=
# One more than there are cores: tests wait for the processes that they start. On two cores this saves a tenth.
WORKERS ?= $(or $(shell nproc >/dev/null 2>&1 && expr $$(nproc) + 1),auto)
# Other servers, each in its own environment.
RIVALS := mlserver kserve pytriton mosec rayserve litserve
# The wheel with a voice detector, which remembers what it has heard.
SILERO := silero-vad==6.2.3
# MLPerf's load generator: wheels only for some platforms, so not one of the dependencies.
LOADGEN := mlcommons-loadgen==6.0.17
# What test-gpu collects: a given ENV needn't have what the other tests import.
GPU_TESTS := $$(grep -rl --include='test_*.py' 'mark\.gpu' tests)
# What the site consists of: the pages, and the files that they link to.
PAGES := '*.md' LICENSE docs deploy examples protos
# How long make fuzz runs, over all its targets.
SECONDS_OF_FUZZING ?= 600
# Pinned, and outside the virtual environment: only make fuzz needs it, and not every platform has it.
ATHERIS := atheris==3.0.0

# For what images install, with the same versions as everything else here.
LOCK_IMAGE := .venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
    --no-emit-index-url --no-annotate --no-header --constraint requirements.lock

# Keeps ONNX Runtime from reporting to anybody: see backends/__init__.py.
export ORT_DISABLE_TELEMETRY ?= 1
# Tests start hundreds of processes, which needn't compile the same modules each, whatever the environment says.
export PYTHONDONTWRITEBYTECODE =

.DEFAULT_GOAL := help
.PHONY: help demo demo-bulk serve test test-gpu check docs protos bench bench-gpu bench-quick bench-sequences bench-pipelines bench-generations bench-arrivals bench-bulk bench-loadgen bench-tuning bench-rivals dist lock witness witness-browser witness-kserve status-figure fuzz mutants proofs bulk-kills bulk-ray clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(READY) ## serve a real model, ask it with many concurrent clients, check every answer: make demo EXAMPLE=embedding
	$(BIN)/python -m examples.$(EXAMPLE).demo $(FOLDER)

demo-bulk: $(READY) ## the same offline, over all files of FOLDER, or over documentation and licences: make demo-bulk EXAMPLE=embedding
	$(BIN)/python -m examples.$(EXAMPLE).bulk $(FOLDER)

serve: $(READY) ## serve the demo's model repository on port 8001 until stopped
	$(BIN)/python -m examples.magika.build models
	$(BIN)/paceline serve models

test: $(READY) ## run all tests
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

# Not strict: ENV may lack plugins that the settings name, and its packages may warn.
test-gpu: $(READY) ## run the tests that need a GPU; without one they are skipped and say why
	$(BIN)/python -m pytest -o addopts=--import-mode=importlib -W default -ra -m gpu $(ARGS) $(GPU_TESTS)

check: $(READY) ## check lint, types, imports, generated code, lock file, wheel
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m paceline.protos.generate --check
	$(BIN)/python -m pytest -q tests/unit/test_imports.py tests/unit/test_packaging.py

docs: .docs/ready ## build the documents as a site into site/: a broken link fails
	rm -rf .docs/pages site
	mkdir -p .docs/pages
	git ls-files -z --cached --others --exclude-standard -- $(PAGES) | tar -c --null -T - | tar -x -C .docs/pages
	NO_COLOR=1 .docs/venv/bin/zensical build --strict --clean
.docs/ready: docs/site.lock
	$(PYTHON) -m venv --clear .docs/venv
	.docs/venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r $<
	@touch $@

dist: $(READY) ## build a wheel and a source distribution into dist/
	$(BIN)/python -m hatchling build

protos: $(READY) ## regenerate the Python code of protos/*.proto
	$(BIN)/python -m paceline.protos.generate

bench: $(READY) ## measure against a bare gRPC server, bare ONNX Runtime and the other servers that are installed
	$(BIN)/python -m bench $(ARGS)

bench-quick: $(READY) ## one short round of every scenario and measurement: fails on errors, whatever the times
	$(BIN)/python -m bench --quick $(ARGS)
	TESTS_LONG=1 $(BIN)/python -m pytest tests/integration/test_bench*.py tests/unit/bench

bench-gpu: $(READY) ## measure on a GPU, ten minutes, correctness first; ARGS='--device cpu --quick' to check that it works
	$(BIN)/python -m bench.gpu $(ARGS)

bench-sequences: $(READY) .witness/silero_vad.onnx ## measure sequences: a voice detector, a fixed cost per execution, the scheduler alone, Triton
	$(BIN)/python -m bench.sequences $(ARGS)
.witness/silero_vad.onnx:
	mkdir -p $(@D)/silero
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --dest $(@D)/silero $(SILERO) \
	    && $(BIN)/python -m zipfile -e $(@D)/silero/*.whl $(@D)/silero && mv $(@D)/silero/silero_vad/data/silero_vad.onnx $@ \
	    || echo "no voice detector: what needs it will skip"
	rm -rf $(@D)/silero

bench-pipelines: $(READY) ## measure pipelines: text in and embedding out over its encoder alone, three models that do nothing over one
	$(BIN)/python -m bench.pipelines $(ARGS)

bench-generations: $(READY) ## measure generations: 32 clients of a decoder over one, over static batches, over a full batch
	$(BIN)/python -m bench.generations $(ARGS)

bench-arrivals: $(READY) ## measure generations at random times: the time to the first token by load
	$(BIN)/python -m bench.generation_arrivals --figure docs/figures/generations.svg $(ARGS)

bench-bulk: $(READY) ## measure offline work: rows per second of bulk jobs over session.run alone, rows at fault, texts by length
	$(BIN)/python -m bench.bulk $(ARGS)

bench-tuning: $(READY) ## measure tuning: what is predicted over what is measured, what is chosen over the best of a grid
	$(BIN)/python -m bench.tuning $(ARGS)

bench-loadgen: $(READY) .bench/loadgen/installed ## measure with MLPerf's LoadGen: its scenarios Offline and Server, on reduced models of the shapes of ResNet-50 and BERT-base
	$(BIN)/python -m bench.loadgen $(ARGS)
.bench/loadgen/installed: | $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --only-binary :all: --target $(@D) $(LOADGEN) \
	    && touch $@ || echo "no LoadGen here: its wheels are for Linux on x86-64 with Python 3.11 to 3.13"

bench-rivals: $(RIVALS:%=.bench/rivals/%/installed) ## install the other servers that `make bench` measures (2.3 GB)
.bench/rivals/%/installed: bench/rivals/%.txt
	$(PYTHON) -m venv --clear $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $< && touch $@ || \
	    echo "no $*: it will be left out"

lock: ## regenerate requirements.lock, the image's locks and the site's
	$(PYTHON) -m venv .venv-lock
	.venv-lock/bin/python -m pip install --quiet uv
	.venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-annotate --no-header --override requirements.overrides --excludes requirements.excludes --extra bench --extra bulk --extra dev --extra demo --extra otel --extra ray pyproject.toml -o requirements.lock
	$(LOCK_IMAGE) --override deploy/container/cpu.overrides --no-emit-package onnxruntime-gpu \
	    --extra otel pyproject.toml deploy/container/cpu.in -o deploy/container/cpu.lock
	$(LOCK_IMAGE) --extra cuda --extra otel pyproject.toml -o deploy/container/cuda.lock
	$(LOCK_IMAGE) deploy/container/bulk.in -o deploy/container/bulk.lock
	$(LOCK_IMAGE) deploy/container/build.in -o deploy/container/build.lock
	.venv-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	    --no-annotate --no-header docs/site.in -o docs/site.lock
	rm -rf .venv-lock

witness: $(READY) .witness/silero_vad.onnx ## install third-party programs that tests use: buf, grpc-js, perf_analyzer, promtool, faketime, hadolint, kubectl, a voice detector, an encoder of texts, the image's environment
	npm install --no-audit --no-fund --prefix .witness @bufbuild/buf@1.75.0 || echo "no buf: its tests will skip"
	npm ci --ignore-scripts --no-audit --no-fund --prefix examples/node \
	    || { rm -rf examples/node/node_modules; echo "no @grpc/grpc-js: its tests will skip"; }
	$(BIN)/python -m tests.deploy.dockerfile .witness/container \
	    || { rm -rf .witness/container; echo "no build of the image: its tests will skip"; }
	tests/deploy/programs.sh .witness/deploy $(BIN)/python || echo "no hadolint, no kubectl: their tests will skip"
	tests/conformance/perf_analyzer.sh .witness/perf_analyzer $(BIN)/python || echo "no perf_analyzer: its tests will skip"
	$(BIN)/python -m examples.embedding.build .witness/embedding || echo "no encoder of texts: its tests will skip"
	tests/from_debian.sh .witness prometheus usr/bin/promtool || echo "no promtool: its tests will skip"
	tests/from_debian.sh .witness libfaketime 'usr/lib/*/faketime/libfaketimeMT.so.1' || echo "no faketime: its tests will skip"

witness-browser: ## unpack Debian's Chromium, in which a test looks at the status page (450 MB); not needed where chromium is installed
	tests/browser.sh .witness/browser || { rm -rf .witness/browser; echo "no Chromium: its test will skip"; }

status-figure: $(READY) witness-browser ## make the picture of the status page in the documents: a minute
	$(BIN)/python -m tests.status_figure docs/figures/status.png

witness-kserve: .bench/rivals/kserve/installed ## install KServe's SDK, whose clients tests use (400 MB)

mutants: $(READY) ## plant 39 faults, one after the other, and see that the tests catch each; an hour
	$(BIN)/python -m tests.mutants $(ARGS)

proofs: $(READY) ## run the tests that have a longer form than in the suite, in it
	TESTS_LONG=1 $(BIN)/python -m pytest tests/conformance/test_node_models.py tests/fault/test_chaos.py tests/fault/test_sequence_chaos.py \
	    tests/integration/test_bulk_examples.py tests/integration/test_stand_in_gpu.py tests/property \
	    tests/unit/scheduler/test_deadly_requests.py $(ARGS)

bulk-kills: $(READY) ## kill a bulk job a hundred times, anywhere in its work, and see that it ends with the same bytes
	TESTS_LONG=1 $(BIN)/python -m pytest tests/fault/test_bulk_kills.py $(ARGS)

bulk-ray: $(READY) ## do a bulk job on a Ray cluster of three nodes in this machine, of which two are lost one after the other
	TESTS_LONG=1 $(BIN)/python -m pytest tests/fault/test_bulk_ray.py $(ARGS)

fuzz: $(READY) ## search for inputs that break a decoder: make fuzz SECONDS_OF_FUZZING=3600 ARGS='infer load'
	test -d .witness/atheris || $(BIN)/python -m pip install --quiet --no-deps --target .witness/atheris $(ATHERIS) \
	    || echo "no atheris: inputs are changed by chance alone"
	PYTHONPATH=.witness/atheris $(BIN)/python -m tests.fuzz --seconds $(SECONDS_OF_FUZZING) $(ARGS)

clean: ## remove everything that the other targets create
	rm -rf $(VENV) .venv-lock .witness .fuzz .bench .docs site examples/node/node_modules bench/results models dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/ready: requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("paceline needs Python 3.11 or newer, this is " + sys.version)'
	@echo "the first time: installing the dependencies into $(VENV), some 700 MB, which takes a minute or more"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 --timeout 60 --require-hashes --no-deps -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@
