# The same training job in float64, on the CPU and on a device, compared rank by rank.
#
#   make ddp                            64 ranks, ten steps: oracle, CPU run, device run, comparisons
#   make all-parity RANKS=4             all four modes, four ranks
#   make report                         one page on all comparisons made so far
#   make fsdp DEVICE=cuda RANKS=8       another device; backends follow from it
#   make tp LAUNCH=torchrun             another launcher with torchrun's options
#
# Written for GNU Make 3.81, which is what macOS has.

# What is run.
RANKS ?= 64
STEPS ?= 10
SEED ?= 0
# Where rank files and logs go: $(RESULTS)/<run>/rank-<rank>.pt and $(RESULTS)/logs/<run>.
RESULTS ?= results
# Python 3.11 or newer, from which .venv is made.
BASE_PYTHON ?= python3
VENV := .venv

# An active environment with torch 2.14 is used as it is; otherwise .venv is made, once.
ifndef PYTHON
ifneq ($(strip $(VIRTUAL_ENV)$(CONDA_PREFIX)),)
ACTIVE_TORCH := $(shell python -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)
endif
PYTHON := $(if $(filter 2.14.%,$(ACTIVE_TORCH)),python,$(VENV)/bin/python)
endif
ifeq ($(PYTHON),$(VENV)/bin/python)
ENVIRONMENT := $(VENV)/installed
TITAN_ENVIRONMENT := $(VENV)/installed-titan
REPORT_ENVIRONMENT := $(VENV)/installed-report
DEV_ENVIRONMENT := $(VENV)/installed-dev
endif

# neuron where torch-neuronx 2.14 or newer is installed, otherwise cpu; and what the device is called in
# what is printed. preflight.py knows the tests' stand-in for torch-neuronx, which is used on request only.
DEVICE_AND_NAME := $(shell $(PYTHON) preflight.py --print-device $(DEVICE) 2>/dev/null)
ifndef DEVICE
DEVICE := $(or $(firstword $(DEVICE_AND_NAME)),cpu)
endif
DEVICE_NAME := $(or $(wordlist 2,9,$(DEVICE_AND_NAME)),$(DEVICE))
BACKEND ?= $(if $(filter cpu,$(DEVICE)),gloo,$(if $(filter cuda,$(DEVICE)),nccl,$(DEVICE)))
COMPILE_BACKEND ?= $(if $(filter neuron,$(DEVICE)),neuron,aot_eager)
# launch.py is torchrun with a warm fork server.
LAUNCH ?= $(PYTHON) launch.py

# The environment of the runs, whatever the shell has: all cores visible, correctness settings, one thread
# per rank. Another value is taken from make's command line only.
export NEURON_LOGICAL_NC_CONFIG := 2
export TORCH_NEURONX_ENABLE_HOST_CC := 0
export OMP_NUM_THREADS := 1
unexport NEURON_RT_VISIBLE_CORES NEURON_RT_NUM_CORES TORCH_NEURONX_ENABLE_STREAMS

ifeq ($(filter cpu neuron cuda,$(DEVICE)),)
$(error DEVICE is '$(DEVICE)': cpu, neuron or cuda)
endif
ifneq ($(words $(RESULTS)),1)
$(error RESULTS is '$(RESULTS)': name one directory, without spaces)
endif

MODES := ddp fsdp tp simplefsdp-tp
# A file that says that make made this results folder.
OURS := $(RESULTS)/made-by-make.txt
TITAN := titan-llama titan-deepseek titan-smoke titan-parity titan-parity-full titan-memory titan-test

.PHONY: help all-parity preflight preflight-quiet oracle report test neuron-test record-test silent-bugs mutants lint format bench clean FORCE
.PHONY: $(TITAN)
.PHONY: $(MODES) $(MODES:%=cpu-%) $(MODES:%=device-%) $(MODES:%=compare-%) $(MODES:%=compare-cpu-%)
# One run at a time, whatever -j says: a run uses every core, and two would mix their output.
.NOTPARALLEL:

help:
	@echo 'Modes: $(MODES)'
	@echo
	@echo 'make <mode>              oracle, CPU run and, unless DEVICE=cpu, device run of one mode, compared'
	@echo 'make all-parity          the same for all modes'
	@echo 'make oracle              the same job in float64 in one process, unless it exists'
	@echo 'make cpu-<mode>          the CPU run, unless it exists with these settings'
	@echo 'make compare-cpu-<mode>  the CPU run with the oracle'
	@echo 'make device-<mode>       the device run; with DEVICE=cpu a second CPU run'
	@echo 'make compare-<mode>      the device run with the CPU run'
	@echo 'make preflight           can this machine run RANKS ranks on DEVICE? Part of every job on a device'
	@echo 'make report              $(RESULTS)/report.html on all comparisons that were made'
	@echo 'make titan-llama         ten steps of Llama 3 by SimpleFSDP in TorchTitan, at debug size off Neuron'
	@echo 'make titan-deepseek      the same of DeepSeek-V3'
	@echo 'make titan-smoke         both on four ranks at TP2 x FSDP2, debug size, on the CPU; each run checked'
	@echo 'make titan-parity        TorchTitan: compiled SimpleFSDP, eager FSDP2 and one rank compared; PARITY_OPTIONS="--family llama3"'
	@echo 'make titan-parity-full   one layer at the full width, four ranks against one: 20 GiB of memory, 25 minutes'
	@echo 'make titan-memory        peak memory per core of the 64-rank recipes, predicted; MEMORY_OPTIONS="--model ..."'
	@echo 'make test                run the tests'
	@echo 'make neuron-test         run the tests of the Neuron path, on a stand-in for torch_neuronx'
	@echo 'make record-test         run the tests of recordings that train'
	@echo 'make titan-test          run the tests of titan/ that train with TorchTitan'
	@echo 'make silent-bugs         train with real mistakes and see that each is found and named'
	@echo 'make mutants             change a line of the judging code at a time and see that the tests notice'
	@echo 'make lint                check style and formatting'
	@echo 'make format              format the code'
	@echo 'make bench               time the CPU references, launch.py beside torchrun'
	@echo 'make clean               remove results, logs and caches; .venv stays'
	@echo
	@echo 'Variables, for instance: make ddp RANKS=4 STEPS=3. Now:'
	@echo 'RANKS=$(RANKS) STEPS=$(STEPS) SEED=$(SEED) DEVICE=$(DEVICE) BACKEND=$(BACKEND) COMPILE_BACKEND=$(COMPILE_BACKEND)'
	@echo 'RESULTS=$(RESULTS) PYTHON=$(PYTHON) LAUNCH="$(LAUNCH)"'

.SECONDEXPANSION:

# One mode, for instance make ddp: the oracle and the CPU run, compared; then the device run, compared with
# the CPU run. Each link of the chain is below.
ifeq ($(DEVICE),cpu)
$(MODES): %: $$(call oracle_dir,$$*)/rank-0.pt cpu-%
	@echo "== $@: no device run was made: DEVICE is cpu"
	$(call compare_cpu,$*)

all-parity: $(MODES)
	@echo "== all-parity: $(MODES) agree with the float64 oracle on the CPU, $(RANKS) ranks; no device run was made"
else
$(MODES): %: preflight-quiet compare-cpu-% device-%
	$(call compare_device,$*)

all-parity: $(MODES)
	@echo "== all-parity: $(MODES) agree with the float64 oracle on the CPU, and with the CPU on $(DEVICE_NAME), $(RANKS) ranks"
endif

# The oracle. The bias-free model of simplefsdp-tp has one of its own.
oracle_dir = $(RESULTS)/oracle-$(if $(filter simplefsdp-tp,$(1)),simplefsdp,eager)
ORACLE_SCRIPTS := training_common.py oracle_train.py
ORACLES := $(RESULTS)/oracle-eager/rank-0.pt $(RESULTS)/oracle-simplefsdp/rank-0.pt

oracle: $(ORACLES)

$(ORACLES): $(RESULTS)/oracle-%/rank-0.pt: $(RESULTS)/.settings-oracle $(ORACLE_SCRIPTS)
	@echo "== oracle-$*: $(STEPS) steps in float64, one process"
	@$(PYTHON) oracle_train.py --model $* --seed $(SEED) --steps $(STEPS) --output-dir "$(RESULTS)/oracle-$*" > /dev/null

# The CPU run. rank-0.pt is written last: where it stands, the run is complete.
SCRIPTS := training_common.py distributed_train.py simplefsdp_tp_train.py launch.py
REFERENCES := $(MODES:%=$(RESULTS)/cpu-%/rank-0.pt)

$(MODES:%=cpu-%): cpu-%: $(RESULTS)/cpu-%/rank-0.pt
	@echo "== $@: reference of $(RANKS) ranks, $(STEPS) steps, seed $(SEED) is in $(RESULTS)/$@"

$(REFERENCES): $(RESULTS)/cpu-%/rank-0.pt: $(RESULTS)/.settings-% $(SCRIPTS)
	$(call run,cpu-$*,cpu,gloo,$(call script,$*,aot_eager))

# The device run, which is always made. A wrong set-up of a device often shows as a hang, so preflight first.
$(MODES:%=device-%): device-%: $(if $(filter cpu,$(DEVICE)),,preflight-quiet) | $(ENVIRONMENT) $(OURS)
	$(call run,$*,$(DEVICE),$(BACKEND),$(call script,$*,$(COMPILE_BACKEND)))

preflight_run = $(PYTHON) preflight.py --device $(DEVICE) --backend $(BACKEND) --ranks $(RANKS) --results "$(RESULTS)"

preflight: | $(ENVIRONMENT)
	@$(preflight_run)

preflight-quiet: | $(ENVIRONMENT)
	@$(preflight_run) --quiet

# $(call script,MODE,COMPILE BACKEND): the script of a mode and the options that only it has.
script = $(if $(filter simplefsdp-tp,$(1)),simplefsdp_tp_train.py --compile-backend $(2),distributed_train.py --parallelism $(1))

# $(call run,RUN,DEVICE,BACKEND,SCRIPT): launch all ranks. Rank 0 speaks here, every rank to its log.
define run
@echo "== $(1): $(RANKS) ranks, $(STEPS) steps on $(if $(filter cpu,$(2)),cpu,$(DEVICE_NAME)) with $(3)"
@$(call take_folder,$(1)); $(call clear_logs,$(1)); start=$$(date +%s); \
trap 'kill $$job; wait $$job; exit 143' INT TERM HUP; \
$(LAUNCH) --standalone --nproc-per-node=$(RANKS) \
  --log-dir "$(RESULTS)/logs/$(1)" --redirects 3 --tee 1 --local-ranks-filter 0 --log-line-prefix-template '   ' \
  $(4) --device $(2) --backend $(3) --expected-world-size $(RANKS) \
  --seed $(SEED) --steps $(STEPS) --output-dir "$(RESULTS)/$(1)" & job=$$!; \
wait $$job && echo "== $(1): $(RANKS) ranks completed in $$(($$(date +%s) - start)) s; logs in $(RESULTS)/logs/$(1)"
endef

# $(call take_folder,RUN): refuse a results folder in which another run is on. The kernel releases it when this
# recipe and what it started have ended.
define take_folder
exec 9<>"$(RESULTS)/in-use.txt"; \
if command -v flock >/dev/null && ! flock -n 9; then \
  echo "error: $(RESULTS) is in use: $$(cat "$(RESULTS)/in-use.txt"); wait for it, or give another RESULTS" >&2; exit 2; fi; \
echo "process $$PPID, make $(1), started $$(date '+%Y-%m-%d %H:%M:%S')" > "$(RESULTS)/in-use.txt"
endef

# $(call clear_logs,RUN): remove what the launcher wrote for an earlier run, and nothing else.
clear_logs = rm -rf $(RESULTS)/logs/$(1)/*/attempt_*; rmdir $(RESULTS)/logs/$(1)/* $(RESULTS)/logs/$(1) 2>/dev/null || true

# The comparisons.
$(MODES:%=compare-cpu-%): compare-cpu-%: $$(call oracle_dir,$$*)/rank-0.pt cpu-%
	$(call compare_cpu,$*)

$(MODES:%=compare-%): compare-%: $$(call oracle_dir,$$*)/rank-0.pt | $(ENVIRONMENT)
	@[ -e "$(RESULTS)/cpu-$*/rank-0.pt" ] || { echo "error: no finished run in $(RESULTS)/cpu-$*: make cpu-$*" >&2; exit 2; }
	@[ -e "$(RESULTS)/$*/rank-0.pt" ] || { echo "error: no finished run in $(RESULTS)/$*: make device-$*" >&2; exit 2; }
	$(call compare_device,$*)

compare_cpu = $(call compare,compare-cpu-$(1),$(call oracle_dir,$(1)),$(RESULTS)/cpu-$(1))
compare_device = $(call compare,compare-$(1),$(RESULTS)/cpu-$(1),$(RESULTS)/$(1),--oracle-dir "$(call oracle_dir,$(1))")

# $(call compare,NAME,REFERENCE,ACTUAL,MORE OPTIONS)
define compare
@echo "== $(1): $(3) with $(2)"
@$(PYTHON) compare_training.py --reference-dir "$(2)" --actual-dir "$(3)" --world-size $(RANKS) $(4) --json "$(RESULTS)/$(1).json"
endef

# The settings of a run that is not repeated. The file is rewritten, and so newer than the run, only when one
# of them changes. An oracle does not depend on the number of ranks.
$(MODES:%=$(RESULTS)/.settings-%) $(RESULTS)/.settings-oracle: $(RESULTS)/.settings-%: FORCE | $(ENVIRONMENT) $(OURS)
	@torch=$$($(PYTHON) -c 'from importlib.metadata import version; print(version("torch"))'); \
	settings="$(if $(filter oracle,$*),,ranks=$(RANKS) )steps=$(STEPS) seed=$(SEED) torch=$$torch"; \
	echo "$$settings" | cmp -s - $@ || echo "$$settings" > $@

# The results folder. If make makes it, or finds it empty, make marks it. make clean removes no other folder.
$(OURS):
	@if [ -z "$$(ls -A "$(RESULTS)" 2>/dev/null)" ]; then \
	  mkdir -p "$(RESULTS)" && echo 'make made this folder, and make clean removes all that is in it.' > $@; fi

clean:
	@if [ -e "$(RESULTS)" ] && [ ! -e $(OURS) ]; then \
	  echo "error: $(RESULTS) was not made by make, so nothing was removed: remove or rename it yourself, then make clean" >&2; exit 2; fi
	@if [ -e "$(RESULTS)" ]; then find "$(RESULTS)/" -mindepth 1 -delete && { rmdir "$(RESULTS)" 2>/dev/null || true; }; fi
	@rm -rf .titan .standin .pytest_cache .ruff_cache
	@rm -rf __pycache__ titan/__pycache__ tests/__pycache__ tests/*/__pycache__ tests/*/*/__pycache__

COMPARISONS := $(MODES:%=$(RESULTS)/compare-cpu-%.json) $(MODES:%=$(RESULTS)/compare-%.json)

report: | $(REPORT_ENVIRONMENT)
	@files="$(foreach file,$(COMPARISONS),$$(ls $(file) 2>/dev/null))"; \
	if [ -z "$$(echo $$files)" ]; then echo "error: $(RESULTS) holds no comparison; run make ddp or another mode first" >&2; exit 2; fi; \
	$(PYTHON) report_training.py $$files --output "$(RESULTS)/report.html"

# TorchTitan. The wrappers choose the device by themselves: the vendor's recipes on a Neuron node.
titan_variables = PYTHON=$(if $(findstring /,$(PYTHON)),$(abspath $(PYTHON)),$(PYTHON)) RESULTS=$(RESULTS)

titan-llama: | $(TITAN_ENVIRONMENT) $(OURS)
	@$(titan_variables) titan/llama_fsdp64.sh $(TITAN_OPTIONS)

titan-deepseek: | $(TITAN_ENVIRONMENT) $(OURS)
	@$(titan_variables) titan/deepseek_tp4_fsdp16.sh $(TITAN_OPTIONS)

titan-smoke: | $(TITAN_ENVIRONMENT) $(OURS)
	@DEVICE=cpu NGPU=4 RECORD='$(RECORD:%=%/llama3)' $(titan_variables) titan/llama_fsdp64.sh --parallelism.tensor_parallel_degree=2
	@DEVICE=cpu NGPU=4 RECORD='$(RECORD:%=%/deepseek_v3)' $(titan_variables) titan/deepseek_tp4_fsdp16.sh
	@echo "== titan-smoke: Llama 3 and DeepSeek-V3 trained at debug size on four ranks of the CPU, TP2 x FSDP2"

titan-parity: | $(TITAN_ENVIRONMENT) $(OURS)
	@$(PYTHON) titan/make_assets.py
	@$(PYTHON) titan/parity.py --results "$(RESULTS)/titan-parity" $(PARITY_OPTIONS)

titan-parity-full: | $(TITAN_ENVIRONMENT) $(OURS)
	@$(PYTHON) titan/make_assets.py
	@$(PYTHON) titan/parity_full.py --device $(DEVICE) --results "$(RESULTS)/titan-parity-full" $(PARITY_OPTIONS)

titan-memory: | $(TITAN_ENVIRONMENT) $(OURS)
	@$(PYTHON) titan/predict_memory.py --results "$(RESULTS)/titan-memory" $(MEMORY_OPTIONS)

$(VENV)/installed: requirements.txt
	@$(BASE_PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and "error: $(BASE_PYTHON) is Python %d.%d, 3.11 or newer is needed: make BASE_PYTHON=python3.12" % v[:2])'
	@echo "== installing torch into $(VENV), once: some minutes, some GB"
	@$(BASE_PYTHON) -m venv $(VENV)
	@$(pip_install) $<
	@touch $@

$(VENV)/installed-%: requirements-%.txt $(VENV)/installed
	@echo "== installing $< into $(VENV), once"
	@$(pip_install) $<
	@touch $@

$(VENV)/installed-dev: requirements-report.txt # which it includes
pip_install = $(VENV)/bin/python -m pip install -q --disable-pip-version-check -r

test: | $(DEV_ENVIRONMENT)
	@$(PYTHON) -c 'import pytest' 2>/dev/null || { echo "error: $(PYTHON) has no pytest: pip install -r requirements-dev.txt" >&2; exit 2; }
	$(PYTHON) -m pytest tests --ignore=tests/silent_bugs --ignore=tests/titan_training --ignore=tests/recording --ignore=tests/test_neuron.py -n 2 --dist loadfile --no-loadscope-reorder

neuron-test: | $(DEV_ENVIRONMENT)
	$(PYTHON) -m pytest tests/test_neuron.py

record-test: | $(DEV_ENVIRONMENT)
	$(PYTHON) -m pytest tests/recording -n 2 --dist loadfile

titan-test: | $(DEV_ENVIRONMENT) $(TITAN_ENVIRONMENT)
	$(PYTHON) -m pytest tests/titan_training -n 2 --dist loadgroup

silent-bugs: | $(DEV_ENVIRONMENT)
	$(PYTHON) -m pytest tests/silent_bugs

mutants: | $(DEV_ENVIRONMENT)
	$(PYTHON) tests/tools/mutate_judging.py $(MUTANT_OPTIONS)

lint: | $(DEV_ENVIRONMENT)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

format: | $(DEV_ENVIRONMENT)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

bench: | $(ENVIRONMENT)
	$(PYTHON) tests/tools/bench.py --ranks $(RANKS)
	$(PYTHON) tests/tools/bench.py --ranks 8 --beside-torchrun # as many as fit without shared memory
	$(PYTHON) tests/tools/bench.py --ranks 4 16 128 256 --modes ddp fsdp
