# make up    install what is needed into .venv and run the main job: NATS, an engine, the router
# make test  install and pass the tests
PYTHON ?= python3
# Tests start many processes, which would all compile the same files.
unexport PYTHONDONTWRITEBYTECODE
VENV ?= .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: browser up kernels docs manifests plugin test test-slow test-random test-long test-vllm test-vllm-slow record-vllm test-dynamo record-dynamo soak lint bench evidence venv clean
.DEFAULT_GOAL := help

help: ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(VENV)/.installed ## install everything into .venv, from exact pins

# torch comes first and alone: its pin decides which build is taken, and nothing later may replace it.
$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Roost needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "creating $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch (pinned; about 200 MB)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	@echo "installing Roost and its dependencies (pinned)"
	@PIP_CONSTRAINT=$(abspath constraints.txt) $(BIN)/python -m pip install -q --disable-pip-version-check -e '.[all,dev,bench]'
	@touch $@

# Only tests and `make manifests` render the chart.
$(BIN)/helm: tests/deploy/manifests/helm.txt | $(VENV)/.installed
	@echo "installing Helm (pinned; 38 MB)"
	@$(BIN)/python tests/deploy/manifests/install_helm.py

# The installation compiles them too; a change of the sources needs only this.
KERNELS := $(wildcard */kernels */*/kernels)
LIBRARIES := $(addsuffix /_compiled.abi3.so,$(KERNELS))

$(LIBRARIES) &: $(wildcard $(addsuffix /*.[ch],$(KERNELS))) hatch_build.py | $(VENV)/.installed
	@$(BIN)/python hatch_build.py || echo "their Python form will serve" >&2

kernels: $(LIBRARIES) ## compile the inner loops in C after a change of their sources

up: venv ## run NATS, one engine of two ranks and the router; ARGS="--engines 2" passes options on
	@exec $(BIN)/roost up $(ARGS)

# The tests of the dashboard drive it; without one they are skipped.
browser: ## install Chromium for the tests of the dashboard (Debian, as root)
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
		|| { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium fonts-dejavu-core >/dev/null; }

test: venv kernels $(BIN)/helm ## the fast tests, two at a time, under six minutes on two cores
	@$(BIN)/python -m pytest -n 2 --dist worksteal $(ARGS)

# Whole fleets have the machine to themselves. Everything else runs two at a time.
FLEETS := tests/system tests/faults

test-slow: venv kernels $(BIN)/helm ## soaks and long fault loops
	@$(BIN)/python -m pytest -n 2 --dist worksteal -m "slow and not long" --timeout 900 $(addprefix --ignore=,$(FLEETS)) $(ARGS)
	@$(BIN)/python -m pytest -m "slow and not long" --timeout 900 $(FLEETS) $(ARGS)

test-random: venv kernels $(BIN)/helm ## the fast tests, whose property tests draw new cases; by hand, it may find old defects
	@$(BIN)/python -m pytest -n 2 --dist worksteal --hypothesis-profile=random $(ARGS)

test-long: venv ## more rounds of slow tests than CI has time for; by hand
	@$(BIN)/python -m pytest -m long --timeout 900 $(ARGS)

test-vllm: venv ## the door and the plugin with a real vLLM, in an environment of its own (.venv-vllm); by hand, not in CI
	@$(BIN)/python -m tests.compat.live

test-vllm-slow: venv ## maps on that vLLM while messages are lost, late, doubled or wrong
	@$(BIN)/python -m tests.compat.live --slow

record-vllm: venv ## record anew what that vLLM answers, for the tests that replay it
	@$(BIN)/python -m tests.compat.live --record

test-dynamo: venv ## our engines inside a real Dynamo, whose frontend is in an environment of its own (.venv-dynamo); by hand, not in CI
	@$(BIN)/python -m tests.dynamo.live $(ARGS)

record-dynamo: venv ## record anew what that Dynamo sends, for the tests that replay it
	@$(BIN)/python -m tests.dynamo.live --record

plugin: venv ## build the wheel of roost-vllm, the plugin that runs in vLLM's workers, into dist/
	@cd engine_adapter/vllm/plugin && $(abspath $(BIN))/hatchling build -t wheel -d $(abspath dist)

soak: venv ## two hours of users and faults before a whole fleet, reported to soak.json; ARGS="--soak-seconds 600 --soak-engine embedded" changes that
	@$(BIN)/python -m pytest -m slow tests/system/test_soak.py -s --soak-seconds 7200 --soak-report soak.json $(ARGS)

lint: venv ## ruff, mypy, the walls, plain English and live links
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python docs/check_prose.py

docs: venv ## generate docs/settings.md, docs/openapi.yaml, docs/asyncapi.yaml and the diagrams from the code
	@for script in $(wildcard docs/make_*.py); do $(BIN)/python $$script || exit 1; done

manifests: venv $(BIN)/helm ## render the chart into deploy/manifests/kubernetes
	@$(BIN)/python -m tests.deploy.manifests.render

bench: venv ## every benchmark, quickly; make bench ARGS=--json
	@for script in $(filter-out %/__init__.py,$(wildcard benchmarks/*.py benchmarks/layouts/*.py benchmarks/real_vllm/*.py)); do echo "== $$script"; $(BIN)/python $$script --quick $(ARGS) || exit 1; done

evidence: venv ## measure the closed loop on a live fleet (an hour) and write docs/evidence; ARGS="--only policies", ARGS="--soak soak.json"
	@$(BIN)/python -m benchmarks.rig.evidence $(ARGS)

clean: ## remove the environment and caches
	rm -rf $(VENV) .venv-peers .venv-vllm .venv-dynamo .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
