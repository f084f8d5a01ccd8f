# Everything runs in .venv, which the first target that needs it makes.
#   make quickstart   install, then train a small transformer whose states live on disk
#   make test         the short tests on all cores

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -qq
TORCH  := $(shell grep '^torch==' constraints.txt)
CORES  := $(shell nproc 2>/dev/null || echo 2)
RANKS  ?= 2
BENCHMARKS := storage update train speculation activations checkpoint base schedule durability papers moe overhead collectives nodes sequence policies
# One thread per core in all: ranks that each take every core only wait for each other.
OMP    := $(shell n=$$(($(CORES) / $(RANKS))); echo $$((n > 0 ? n : 1)))
# Processes of the suite; each takes about 1 GB, and some tests start two more. One more than cores, because
# tests of ranks wait: for drives, for each other, for time limits.
JOBS   ?= $(shell n=$$(($(CORES) + 1)); echo $$((n < 8 ? n : 8)))

.DEFAULT_GOAL := help
.PHONY: help install dev quickstart test thorough slow ecosystem bare wheel gpu lint format types check bench-quick bench capacity clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

# torch comes first and by its exact version: a looser range may bring gigabytes of CUDA packages.
$(VENV)/.torch: constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $(TORCH) into $(VENV)"
	@$(PIP) install -c constraints.txt '$(TORCH)'
	@touch $@

$(VENV)/.installed: $(VENV)/.torch pyproject.toml
	@echo "installing infinity into $(VENV)"
	@$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing infinity and the tools of its developers into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed  ## make .venv and install the package

dev: $(VENV)/.dev  ## the same, with everything that tests and benchmarks need

quickstart: $(VENV)/.installed  ## install, then train a small transformer with its states on disk
	OMP_NUM_THREADS=$(OMP) $(BIN)/torchrun --nproc-per-node $(RANKS) \
		-m infinity train configs/quickstart.yaml

test: $(VENV)/.dev  ## the short tests: some minutes
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore tests/ecosystem -m "not slow and not gpu and not thorough"

thorough: $(VENV)/.dev  ## the same, and those that take seconds each
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore tests/ecosystem

slow: $(VENV)/.dev  ## the long tests
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "slow and not gpu" --timeout 1800

$(VENV)/.ecosystem: $(VENV)/.dev
	@echo "installing what tests/ecosystem needs into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[ecosystem]'
	@touch $@

ecosystem: $(VENV)/.ecosystem  ## against other packages: trainers, stored forms
	$(BIN)/python -m pytest -n $(CORES) --dist worksteal tests/ecosystem

bare: $(VENV)/.dev  ## the core of the suite and the quickstart on poor machines, one condition at a time
	$(BIN)/python tests/bare.py

wheel: $(VENV)/.dev  ## build the wheel, install it into an empty environment, train with it
	$(BIN)/python tests/wheel.py

gpu: $(VENV)/.dev  ## all that needs an accelerator: tests, bandwidths, training; writes benchmarks/results/gpu.md
	$(BIN)/python benchmarks/gpu.py $(if $(MINUTES),--minutes $(MINUTES))

lint: $(VENV)/.dev  ## ruff, and the format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev  ## put the code into the format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.dev  ## mypy --strict
	$(BIN)/mypy

check: lint types thorough  ## lint, types and all tests but the long ones

bench-quick: $(VENV)/.dev  ## each benchmark in under a minute
	@for script in $(BENCHMARKS); do \
		echo; echo "== benchmarks/$$script.py --quick"; $(BIN)/python benchmarks/$$script.py --quick; \
	done

bench: $(VENV)/.dev  ## the full benchmarks, with figures in benchmarks/results/ (over an hour)
	@mkdir -p benchmarks/results
	@for script in $(BENCHMARKS); do \
		echo; echo "== benchmarks/$$script.py"; \
		$(BIN)/python benchmarks/$$script.py --json benchmarks/results/$$script.json; \
	done

capacity: $(VENV)/.dev  ## models far larger than the memory allowed (long)
	@mkdir -p benchmarks/results
	$(BIN)/python benchmarks/capacity.py --params 1.2B --rss 4GiB --json benchmarks/results/capacity_1.2B.json
	$(BIN)/python benchmarks/capacity.py --params 4B --rss 16GiB --json benchmarks/results/capacity_4B.json
	$(BIN)/python benchmarks/checkpoint.py --params 1.2B --rss 4GiB --json benchmarks/results/checkpoint_1.2B.json

clean:  ## remove caches, builds and runs; .venv stays
	rm -rf build dist runs *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find infinity tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} +
