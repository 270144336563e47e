# make demo traces small models of every family; make test proves that the tree works. Both install what they need
# into .venv, with the versions of constraints.txt, and a second call installs nothing.

SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL := smollm2-135m-instruct-q4_1
# One model of each family; they come with the package.
FAMILIES := $(addsuffix -8,$(addprefix zoo/,transformer mamba1 mamba2 gdn gdn-attention mamba2-attention mamba2-parallel))
# Each of the two test workers gets one core: more threads than cores make small models many times slower.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help demo zoo test test-hooked-transformer test-floor support lint format clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.installed-gguf  ## trace seven families and a 135M-parameter model, then plan, train and compare
	$(BIN)/tracer trace $(FAMILIES) --limit 20 --out runs/demo --resume
	@$(BIN)/tracer fetch $(MODEL); status=$$?; \
	if [ $$status -eq 2 ]; then echo "$(MODEL) cannot be had here; the zoo, traced above, needs no network"; exit 0; fi; \
	[ $$status -eq 0 ] || exit $$status; \
	set -x; $(BIN)/tracer trace $(FAMILIES) $(MODEL) --limit 20 --out runs/demo --resume
	$(BIN)/python figures/chain.py --out runs/demo-chain

zoo: $(VENV)/.installed-dev  ## train the zoo from nothing (70 minutes on two idle cores), and measure docs/FINDINGS.md
	$(ONE_THREAD) $(BIN)/python -m tracer.zoo.build --out runs/zoo --jobs 2
	$(ONE_THREAD) $(BIN)/python figures/zoo_findings.py --measure runs/zoo

test: $(VENV)/.installed-dev  ## run the tests, some of them on real weights (PYTEST_ARGS adds options)
	$(BIN)/tracer fetch $(MODEL)
	$(ONE_THREAD) $(BIN)/pytest -n 2 $(PYTEST_ARGS)

# TransformerLens 3.9 lies beside the environment and goes before 4.x on the path of this one call.
HOOKED := $(VENV)/transformer-lens-3.9

$(HOOKED)/.installed: $(VENV)/.installed-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(HOOKED) \
		transformer-lens==3.9.0 better-abc==0.0.3
	@touch $@

test-hooked-transformer: $(HOOKED)/.installed  ## test a live HookedTransformer with TransformerLens 3.9
	PYTHONPATH=$(HOOKED) $(ONE_THREAD) $(BIN)/pytest tests/models/test_hooked_transformer.py

# The oldest transformers that pyproject.toml allows, with the newest packages that it allows, likewise beside it.
FLOOR := 5.9.0
OLDEST := $(VENV)/transformers-$(FLOOR)

$(OLDEST)/.installed: $(VENV)/.installed-dev
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(OLDEST) \
		transformers==$(FLOOR) huggingface-hub==1.33.0 tokenizers==0.22.2
	@touch $@

test-floor: $(OLDEST)/.installed  ## test with the oldest transformers that is allowed, and tell the README
	PYTHONPATH=$(OLDEST) $(ONE_THREAD) $(BIN)/pytest -n 2 tests/models tests/test_engine.py tests/test_tracing.py
	PYTHONPATH=$(OLDEST) $(ONE_THREAD) $(BIN)/python tests/support_table.py --floor

support: $(VENV)/.installed-dev  ## measure anew which architectures work (support.csv, README), and prove it
	$(ONE_THREAD) $(BIN)/python tests/support_table.py
	$(ONE_THREAD) $(BIN)/pytest -n 2 tests/models/test_every_architecture.py tests/models/test_support.py

lint: $(VENV)/.installed-dev  ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev  ## bring the code into the checked format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment, build products and the demo's run
	rm -rf $(VENV) build dist runs/demo runs/demo-chain .pytest_cache .ruff_cache .mypy_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "LayerTracer needs Python 3.11 or newer, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one with: make PYTHON=python3.11" >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 2; }

# torch goes first and by its exact version: asked for by a range, it may come in another and far larger build.
$(VENV)/.installed-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing into $(VENV); the first time this takes some minutes."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		"$$(grep '^torch==' constraints.txt)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$*]'
	@touch $@
