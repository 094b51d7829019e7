# `make help` lists what there is. Python 3.10 or newer, python3-venv and a C++ compiler are all that must be there before.
PYTHON ?= python3
export PYTHON

# One thread a process: the tests and the quick start run several processes side by side.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help install quickstart test test-all test-newest pytest pytest-all mutants lint format clean distclean
.PHONY: bench bench-predict bench-steps bench-saves bench-setups bench-choosing bench-plans bench-network bench-planning bench-queues bench-emulate
.PHONY: bench-host bench-gpu bench-offload bench-sppo bench-sppo-steps bench-infinipipe bench-infinipipe-steps bench-search reproduce

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16

install:  ## make .venv and install the pinned dependencies and this checkout (quick when nothing changed)
	@tools/install.sh

quickstart: install  ## train a small GPT on the Python standard library's source over 2 pipeline ranks; SCHEDULE=1f1b make quickstart
	@examples/quickstart.sh

# Two processes; each runs whole files, whose tests share what they launch, in the order of the folders.
BESIDE = --numprocesses 2 --dist loadfile --no-loadscope-reorder

test:  ## before each commit: install, the tests that find every known kind of mistake, lint
	@$(MAKE) --no-print-directory pytest
	@$(MAKE) --no-print-directory lint

test-all:  ## what CI runs: install, every test (those marked `thorough` as well), lint
	@$(MAKE) --no-print-directory pytest-all
	@$(MAKE) --no-print-directory lint

test-newest:  ## a part of the suite on the newest megatron-core, and the same losses; needs Python 3.12 or newer
	@tools/newest.sh

pytest: install  ## the tests of `make test` alone, in two processes; make pytest ARGS="tests/test_docs.py -x" runs in one
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest $(or $(ARGS),$(BESIDE))

pytest-all: install  ## the tests of `make test-all` alone, and which 20 took longest; ARGS="-k chimera" runs in one
	env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -m pytest -m "not gpu and not netlab" --durations=20 $(or $(ARGS),$(BESIDE))

mutants: install  ## break the code on purpose, one line at a time: tests must notice; make mutants ARGS="--only w-before-i"
	.venv/bin/python tools/mutants.py $(ARGS)

lint: install  ## ruff (rules and format) and mypy
	.venv/bin/python -m ruff check .
	.venv/bin/python -m ruff format --check .
	.venv/bin/python -m mypy

format: install  ## let ruff sort imports and format the code
	.venv/bin/python -m ruff check --fix .
	.venv/bin/python -m ruff format .

bench: install  ## speed and memory beside megatron-core's and torch's engines; make bench ARGS="--rows 1f1b"
	.venv/bin/python benchmarks/bench.py $(ARGS)

bench-predict: install  ## step time and memory as simulated from a profile, and as measured; make bench-predict ARGS="--cases 128"
	.venv/bin/python benchmarks/predict.py $(ARGS)

bench-steps: install  ## training steps with and without a flush between them; make bench-steps ARGS="--schedules zb2p"
	.venv/bin/python benchmarks/steps.py $(ARGS)

bench-saves: install  ## how long a checkpoint holds up training, written at once and beside it; make bench-saves ARGS="--rounds 15"
	.venv/bin/python benchmarks/saves.py $(ARGS)

bench-setups: install  ## HelixPipe's published setups, simulated; make bench-setups ARGS="--tokens 128 --nodes 8"
	.venv/bin/python benchmarks/setups.py $(ARGS)

bench-sppo: install  ## SPPO's published setups, simulated; make bench-sppo ARGS="--models 7b"
	.venv/bin/python benchmarks/sppo_setups.py $(ARGS)

bench-choosing: install  ## the table of docs/choosing.md, simulated; make bench-choosing ARGS="--rows 3"
	.venv/bin/python benchmarks/choosing.py $(or $(ARGS),--output docs/choosing.md)

bench-search: install  ## what a search over orders gains, simulated, into docs/schedule_search.md; ARGS="--rows 3 --few"
	PYTHONPATH=. .venv/bin/python benchmarks/search.py $(or $(ARGS),--output docs/schedule_search.md)

bench-plans: install  ## the worked example of docs/planning.md, written anew
	.venv/bin/python benchmarks/plans.py $(ARGS)

reproduce: install  ## published figures beside predicted ones, into docs/reproduction.md; CELLS=file.json prints those of a file
	PYTHONPATH=. .venv/bin/python benchmarks/reproduce.py $(if $(CELLS),--cells $(CELLS),--output docs/reproduction.md) $(ARGS)

bench-network: install  ## pipelines and FSDP2 over slow links between two hosts (root); make bench-network ARGS="--delay 1ms"
	.venv/bin/python benchmarks/network.py $(ARGS)

bench-emulate: install  ## emulated clusters of 8 to 32 ranks (root): predicted steps and emulated ones; ARGS="--ranks 16"
	.venv/bin/python benchmarks/emulate.py $(ARGS)

bench-host: install  ## what the executor itself takes for each instruction; make bench-host ARGS="--beside ../other"
	PYTHONPATH=. .venv/bin/python benchmarks/host_time.py $(ARGS)

bench-gpu: install  ## tests, profiles, predictions and training on a GPU, into a folder; make bench-gpu ARGS="--output runs/gpu"
	PYTHONPATH=. .venv/bin/python benchmarks/gpu.py $(ARGS)

bench-sppo-steps: install  ## SPPO's published setups with offloading, simulated; make bench-sppo-steps ARGS="--models 7b --longest"
	PYTHONPATH=. .venv/bin/python benchmarks/sppo_steps.py $(ARGS)

bench-infinipipe: install  ## InfiniPipe's published setups, simulated, into docs/infinipipe.md; ARGS="--models 7b --balance"
	PYTHONPATH=. .venv/bin/python benchmarks/infinipipe.py $(ARGS)

bench-infinipipe-steps: install  ## training on documents of all lengths, measured on this machine: 20 minutes on a quiet one
	PYTHONPATH=. .venv/bin/python benchmarks/infinipipe_steps.py $(ARGS)

bench-offload: install  ## activations in the host's memory beside recomputation; make bench-offload ARGS="--part 0.5"
	.venv/bin/python benchmarks/offload.py $(ARGS)

bench-planning: install  ## processor time of planning large steps; make bench-planning ARGS="--beside ../other"
	PYTHONPATH=. .venv/bin/python benchmarks/planning.py $(ARGS)

bench-queues: install  ## simulated steps on GPUs with one hardware queue; make bench-queues ARGS="--ranks 8"
	.venv/bin/python benchmarks/queues.py $(ARGS)

clean:  ## remove caches, builds and what the quick start wrote (its next run starts over)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis runs/quickstart
	find . -name .venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## remove .venv as well
	rm -rf .venv
