# One verb each; `make` alone prints them.
VENV    := .venv
BIN     := $(VENV)/bin
STAMP   := $(VENV)/.installed
PYTHON  ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
             $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
FAST    ?=
CONFIG  ?= serve_configs/tiny_cpu.yaml
TESTS   ?=
SCALE   ?= 1
MINUTES ?= 10
BROWSERS := chromium chromium-browser google-chrome google-chrome-stable
ARGS    ?=
SCENARIO ?= --help
STAGE   ?=
CHECKPOINT ?= $(error CHECKPOINT=folder is needed)

.DEFAULT_GOAL := help
.PHONY: help install install-gpu browser fmt check test test-fast test-parity test-e2e test-gpu bench-talker bench-codec bench-serve load autoscale chaos soak serve serve-gpu train-speaking clean

help:  ## Print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP)  ## Make .venv with the locked versions of .ci/constraints.txt; nothing to do when it is up to date

$(STAMP): pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "needs Python 3.11 or newer on PATH (or PYTHON=/path/to/python)" >&2; exit 1; }
	@echo "==> 1/2 virtual environment $(VENV) from $$($(PYTHON) --version)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "==> 2/2 packages, locked by .ci/constraints.txt (torch alone is about 200 MB; some minutes)"
	$(BIN)/python -m pip install --disable-pip-version-check -c .ci/constraints.txt -e '.[serve,load,wer,dev]'
	@touch $@

install-gpu: $(STAMP)-gpu  ## The packages of the GPU kernels on top

$(STAMP)-gpu: $(STAMP)
	$(BIN)/python -m pip install --disable-pip-version-check -c .ci/constraints.txt -e '.[gpu]'
	@touch $@

browser:  ## Debian's Chromium, for the tests of the page, where there is no browser yet; needs root
	@for name in $(BROWSERS); do command -v $$name > /dev/null && exit 0; done; \
	echo "==> Chromium from the distribution (100 MB)"; \
	{ apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; } \
	|| echo "==> not installed: without one of $(BROWSERS) on PATH, the tests of the page will fail" >&2

fmt: install  ## Rewrite the sources in the project's format
	$(BIN)/ruff check --fix --quiet . || true
	$(BIN)/ruff format .

check: install  ## Formatting, lint, types and import direction; rewrites nothing
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: check browser  ## Everything a machine without a GPU can show: check + unit + parity + end-to-end
	$(BIN)/python -m pytest -n 2 --dist loadscope -m 'not gpu' $(TESTS)

test-fast: install browser  ## Only tests that import no torch
	$(BIN)/python -m pytest --no-torch $(TESTS)

test-parity: install  ## The reference's numbers: every golden array, at its tolerance
	$(BIN)/python -m pytest tests/parity

test-e2e: install browser  ## The real app over loopback HTTP
	$(BIN)/python -m pytest tests/e2e

test-gpu: install  ## GPU tests; a missing GPU is a failure, not a skip
	$(BIN)/python -m pytest -m gpu --require-gpu $(TESTS)

bench-talker: install-gpu  ## ms per frame of the Talker engine on this GPU; CHECKPOINT=a folder of the official layout
	$(BIN)/python -m load_tests.bench_talker --checkpoint $(CHECKPOINT)

bench-codec: install-gpu  ## ms per step of the codec decoder on this GPU, and what each dtype costs; CHECKPOINT=a folder
	$(BIN)/python -m load_tests.bench_codec --checkpoint $(CHECKPOINT)

bench-serve: CONFIG = serve_configs/qwen3tts.yaml
bench-serve: install-gpu  ## Our server under load on this GPU, and what stops it; CHECKPOINT=a folder, FAST=1, ARGS='--seconds 20'
	$(BIN)/python -m load_tests.bench_serve --config $(CONFIG) --checkpoint $(CHECKPOINT) $(if $(FAST),--fast) $(ARGS)

load: install  ## A load on a running server; SCENARIO='closed --url … --out runs/a', or -h
	$(BIN)/python -m load_tests $(SCENARIO)

autoscale: install  ## Watch it grow and shrink on a cluster of claimed nodes and GPUs, on CPU; some minutes
	RAY_AUTH_MODE=disabled $(BIN)/python -m load_tests.autoscale

chaos: install  ## Kill, redeploy, overload, stall and leave a server of its own, and count what is lost; SCALE=0.05 is a quick look
	$(BIN)/python -m load_tests.chaos --scale $(SCALE)

soak: install  ## Mixed load for MINUTES; memory, files, slots and pages must stay flat; a plot in build/soak.png
	$(BIN)/python -m load_tests.soak --minutes $(MINUTES)

serve: install  ## Serve CONFIG (default: the small speaking checkpoint, on CPU) and speak once; FAST=1 puts HAProxy in front
	@$(BIN)/python -m deployments.launch $(if $(FAST),--fast) $(if $(MPS),--mps) $(CONFIG)

serve-gpu: MPS = 1
serve-gpu: install-gpu  ## The same with the published 1.7B checkpoint on one GPU, under an MPS daemon of its own (MPS= without)
	@$(MAKE) --no-print-directory serve FAST=1 MPS=$(MPS) CONFIG=serve_configs/qwen3tts.yaml

train-speaking: install  ## One stage of making checkpoints/speaking; STAGE=prepare, data, codec, encode, talker, export or evaluate, ARGS='--budget-s 480'
	@test -n "$(STAGE)" || { cat checkpoints/speaking/recipe/README.md; exit 0; }
	@test -z "$(STAGE)" || $(BIN)/python -m checkpoints.speaking.recipe.run $(STAGE) $(ARGS)

clean:  ## Remove the virtual environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build *.egg-info
