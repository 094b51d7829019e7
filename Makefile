# `make help` lists what there is. Python 3.10 or newer, python3-venv and a C++ compiler are all that must be there before.
PYTHON ?= python3
export PYTHON

# One thread a process: the tests and the quick start run several processes side by side.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-newest test-megatron pytest pytest-thorough slurm hunt mutants contracts gpu-hour lint format clean distclean
.PHONY: bench reproduce playground docs dist drill

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo; $(PYTHON) -m benchmarks --targets

install:  ## make .venv and install the pinned dependencies and this checkout (quick when nothing changed)
	@tools/install.sh

quickstart: install  ## train a small GPT on the Python standard library's source over 2 pipeline ranks; SCHEDULE=1f1b make quickstart
	@examples/quickstart.sh

playground: install  ## schedules to try in a browser, on this machine alone; the first time npm fetches Pyodide. ARGS="--output site"
	.venv/bin/python -m schedules.command playground $(ARGS)

docs: install  ## the site, into build/site: tutorial, pages, reference of all flags, the playground where there is Pyodide
	@tools/docs.sh

dist: install  ## the source distribution and a wheel, into dist/, tried once
	@tools/dist.sh

# Two processes; each runs whole files, whose tests share what they launch, in the order of the folders.
BESIDE = --numprocesses 2 --dist loadfile --no-loadscope-reorder

# mypy runs in one process, with the time that the tests leave. What it finds is printed again at the end.
test:  ## before each commit: install, the tests that find every known kind of mistake, lint
	@$(MAKE) --no-print-directory --jobs 2 pytest lint || { $(MAKE) --no-print-directory lint; exit 1; }

test-all: test  ## what CI runs: `make test`, then every other test
	@$(MAKE) --no-print-directory pytest-thorough

test-newest:  ## a part of the suite on the newest megatron-core, and the same losses; needs Python 3.12 or newer
	@tools/newest.sh

test-megatron:  ## NVIDIA's own checkout beside every schedule, on the CPU: make test-megatron MEGATRON_LM=DIR; Python 3.12
	@SCRIPTS=1 MEGATRON_LM="$(or $(MEGATRON_LM),$(error name the checkout: make test-megatron MEGATRON_LM=DIR))" tools/newest.sh

hunt: install  ## property tests on random examples: prints its seed, and a test for each failure; ARGS="--times 5 tests/planning"
	.venv/bin/python -m tests.hunt $(or $(ARGS),$(BESIDE))

pytest: install  ## the tests of `make test` alone, in two processes; make pytest ARGS="tests/test_docs.py -x" runs in one
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest $(or $(ARGS),$(BESIDE))

pytest-thorough: install  ## the tests that `make test` leaves out, and which 20 took longest; ARGS="-k chimera" runs in one
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -m "thorough and not gpu and not netlab and not slurm and not drill and not megatron" --durations=20 $(or $(ARGS),$(BESIDE))

slurm: install  ## the batch scripts and launchers of examples/ on a SLURM of their own; root, and what tools/slurm.sh installs
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -m slurm --durations=20 $(or $(ARGS),--numprocesses 3 --dist loadfile tests/slurm)

mutants: install  ## do the tests notice broken code? make mutants FOLDER=helixpipe/lowering TESTS="tests/lowering"
	FOLDER="$(FOLDER)" TESTS="$(TESTS)" tools/mutants.sh

contracts: install  ## downloads what only a GPU's machine has (0.6 GB) and binds calls against it, into docs/contracts.md
	.venv/bin/python tools/contracts.py $(ARGS)

lint: install  ## ruff (rules and format) and mypy
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

format: install  ## let ruff sort imports and format the code
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

# A benchmark is named after the dash; `make help` lists them (benchmarks/run.py has the table).
bench: bench-engines

bench-choosing: ARGS ?= --overlap-tp-comm auto --output docs/choosing.md

gpu-hour:  ## one of three calls of 9.5 minutes on one GPU, without a network; CALL=2; into runs/gpu (docs/gpu.md)
	$(if $(wildcard .venv/bin/python),.venv/bin/python,$(PYTHON)) -m benchmarks gpu --call $(or $(CALL),1) $(ARGS)

bench-%: install
	.venv/bin/python -m benchmarks $* $(ARGS)

reproduce: install  ## published figures beside predicted ones, into docs/reproduction.md; CELLS=file.json prints those of a file
	.venv/bin/python -m benchmarks reproduce $(if $(CELLS),--cells $(CELLS),--output docs/reproduction.md) $(ARGS)

drill: install  ## a fault of each kind in small runs: how soon it is found and recovered from (10 minutes; root for some)
	.venv/bin/python -m pytest -m drill tests/resilience/test_drill.py $(ARGS)

clean:  ## remove caches, builds and what the quick start wrote (its next run starts over)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/quickstart
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	rm -rf .venv
