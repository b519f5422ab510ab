SHELL := bash
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
SEED ?= 1
# Tests at a time: one more than cores, because some only wait.
JOBS ?= $(shell expr $$(nproc) + 1)

# Of the kit for a GPU machine: prompts to bring in place of the project's own.
PROMPTS ?= lab/experiments/prompts.jsonl
KIT ?= gpu-kit

# Compiled files of Python are kept, wherever this runs: without them every process that a test starts compiles
# all of Slipstream again, and so does pytest with every test.
unexport PYTHONDONTWRITEBYTECODE

# Whose interpreter and compiler the tests of GPU kernels use where there is no GPU.
TRITON := 3.9.0

.PHONY: setup demo test long check kernels gpu gpu-kit sim bench pictures clean

setup: $(VENV)/.ready

# The stamp is newer than these files when everything in them is installed. The versions are those of the
# lock file; both projects of the repository are installed with -e: `slipstream` finds the rest here, and the
# command line finds the lab's commands (docs/adr/0001). Their version stands in slipstream/__init__.py.
# `make setup` of earlier versions left a link in the place of that package. Last, the C++ for this processor is
# compiled; without a compiler a line says what runs instead.
$(VENV)/.ready: pyproject.toml setup.py lab/pyproject.toml lab/setup.py slipstream/__init__.py requirements/lock.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or later is needed: make PYTHON=python3.11 setup" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install -q --upgrade 'pip>=25.1'
	find $(VENV)/lib -maxdepth 3 -name slipstream -type l -delete
	$(RUN) -m pip install -q -c requirements/lock.txt --group dev
	PYTHONWARNINGS=ignore $(RUN) -m pip install -q -c requirements/lock.txt --no-build-isolation \
	  -e '.[ray,serve,structured,lossless]' -e ./lab
	$(RUN) -m engine.cpu_library || true
	touch $@

demo: setup
	$(RUN) -m coordinator demo --fetch $(if $(PROMPT),'$(PROMPT)')

# JOBS tests at a time; what depends on time (the mark `timed`) waits for the others, and they wait for it.
test: setup
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m 'not long and not slow and not gpu'

# What `make test` has no time for. Much of it is processes that start and wait: JOBS files at a time,
# so that the tests of one still share theirs. On one thread each: with two, they keep each other waiting.
long: setup
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(JOBS) --dist loadfile -m 'long and not slow and not gpu'

check: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(RUN) -m pytest -n $(JOBS) --dist worksteal -m 'not gpu and (not process or not (long or slow))'
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist loadfile -m 'process and (long or slow) and not gpu'

# The kernels for GPUs: Triton's interpreter runs them, and its compiler makes them for a GPU that is not here.
# In a folder of its own (0.9 GB), so that nothing else finds this Triton.
kernels: setup
	[ -d $(VENV)/triton/triton ] || $(RUN) -m pip install -q --no-deps --target $(VENV)/triton triton==$(TRITON)
	PYTHONPATH=$(VENV)/triton $(RUN) -m pytest -n 2 tests/engine/forward/test_kernels_for_gpus.py
	PYTHONPATH=$(VENV)/triton TRITON_INTERPRET=1 OMP_NUM_THREADS=1 \
	  $(RUN) -m pytest -n 2 tests/engine/forward/test_split_kernel.py tests/engine/forward/test_few_rows.py \
	    tests/engine/quantised/test_gpu_products.py

gpu: setup
	$(RUN) -c 'import torch; raise SystemExit(not torch.cuda.is_available())' \
	  || { echo "no GPU that this torch can use" >&2; exit 1; }
	$(RUN) -m pytest -m gpu tests/gpu

# What a GPU machine without a network lacks, in one folder (docs/gpu.md).
gpu-kit: setup
	$(RUN) -m lab.gpu_kit.pack --out $(KIT) --prompt-file $(PROMPTS) $(KIT_OPTIONS)

# Those of the README, by running what they show: a quarter of an hour, with nothing else running.
pictures: setup
	$(RUN) -m lab.pictures

sim: setup
	$(RUN) -m tests.simulation $(SEED)

bench: setup
	$(RUN) -m coordinator experiment bench --report

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
