# The targets of this project. Each one sets up what it needs and says so; `make` alone lists them.

PYTHON_OF_VENV := .venv/bin/python
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_MINUTES ?= 10
SOAK_SEED ?=
SOAK_ARGS ?=
SECONDS ?=
SEED ?=
SIMULATE_ARGS ?=
# Most tests wait for a due time or a server: three workers on two cores take half the time, each with servers of its own.
PYTEST_SPREAD ?= -n 3 --dist loadfile
# Empty if something else checks the style: .ci/run does, next to the tests.
LINT ?= lint

.DEFAULT_GOAL := help

.PHONY: help
help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: ## .venv with the delayer command only
	@.ci/setup venv

.PHONY: demo
demo: servers ## the main job on private servers: both modes, an audit, a summary; under a minute once installed
	@$(PYTHON_OF_VENV) -m tests.support.demo

.PHONY: run
run: servers ## private servers and the daemon, up until Ctrl-C; prints how to send a message
	@$(PYTHON_OF_VENV) -m tests.support.up

.PHONY: test
test: ready $(LINT) ## check, then the tests, against real servers of their own; under ten minutes (PYTEST_ARGS=… to choose)
	@$(PYTHON_OF_VENV) -m pytest $(PYTEST_SPREAD) $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: ready ## the slow tests: Spark, every import, and whole daemons killed again and again
	@$(PYTHON_OF_VENV) -m pytest $(PYTEST_SPREAD) -m 'slow and not long' $(PYTEST_ARGS)

.PHONY: test-reworded
test-reworded: ready ## the tests with another text for every reason: no decision reads one
	@TEST_REWORDED=1 $(PYTHON_OF_VENV) -m pytest $(PYTEST_SPREAD) $(PYTEST_ARGS)

.PHONY: test-faults
test-faults: ready ## every fault, overload and clock, including tests of a minute; a quarter of an hour
	@$(PYTHON_OF_VENV) -m pytest $(PYTEST_SPREAD) -m 'long or not long' tests/faults $(PYTEST_ARGS)

.PHONY: test-long
test-long: ready ## the tests of a minute or more, which the build server leaves out; an hour
	@$(PYTHON_OF_VENV) -m pytest $(PYTEST_SPREAD) -m long $(PYTEST_ARGS)

.PHONY: mutants
mutants: ready ## break one line at a time and see that its tests notice (MUTANTS=NAMES to choose); long
	@$(PYTHON_OF_VENV) -m tests.mutants $(MUTANTS)

.PHONY: soak
soak: servers ## two daemons in both modes while everything breaks, and an account of every message (SOAK_MINUTES=10)
	@SOAK_MINUTES=$(SOAK_MINUTES) SOAK_SEED=$(SOAK_SEED) $(PYTHON_OF_VENV) -m tests.soak $(SOAK_ARGS)

.PHONY: simulate
simulate: ready ## daemons and their faults in virtual time (SECONDS=600 SEED=1 SIMULATE_ARGS="--mode keys --runs 10 --shrink"; a night: SIMULATE_ARGS="--new 28800 --jobs --results FILE")
	@$(PYTHON_OF_VENV) -m tests.simulation $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(SIMULATE_ARGS)

.PHONY: test-brokers
test-brokers: ready ## the tests that talk to a broker, against RabbitMQ 3.10, 4.0 and 4.3; as root (SUITES=…, LONG=no, PYTEST_ARGS=…)
	@.ci/brokers $(PYTEST_SPREAD) $(PYTEST_ARGS)

.PHONY: audit-deps
audit-deps: ## pip-audit over every pinned version: known vulnerabilities (exit 3: not every version could be checked)
	@.ci/audit-deps

.PHONY: check
check: dev lint ## style, types and import rules; no server
	@$(PYTHON_OF_VENV) -m pytest --quiet tests/unit/test_imports.py

.PHONY: bench
bench: servers ## rates, lateness and cost next to the ceilings of broker and database; over two hours (BENCH_ARGS=…)
	@$(PYTHON_OF_VENV) -m bench $(BENCH_ARGS)

.PHONY: bench-quick
bench-quick: servers ## the same in small, without the sections that take minutes
	@$(PYTHON_OF_VENV) -m bench --quick $(BENCH_ARGS)

# The time that everything built is dated with: one commit gives the same bytes each time.
dist deb: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)

.PHONY: dist
dist: dev ## sdist and wheel in dist/, checked
	@rm -rf dist
	@PIP_CONSTRAINT=constraints.txt $(PYTHON_OF_VENV) -m build --quiet
	@$(PYTHON_OF_VENV) -m twine check --strict dist/*
	@sha256sum dist/*

.PHONY: deb
deb: ## the Debian package in dist/, for the Debian that this runs on (EXTRAS=segments puts pyarrow in)
	@.ci/deb

.PHONY: release
release: dev ## the last commit as sdist, wheel, Debian package, SBOM and checksums in dist/; builds twice, compares
	@.ci/release

.PHONY: clean
clean: ## delete .venv and everything built here
	rm -rf .venv dist build .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# ---- steps of the above

.PHONY: dev servers ready lint
dev:
	@.ci/setup dev
servers:
	@.ci/setup dev servers
ready:
	@.ci/setup dev servers mariadb
lint: dev
	@$(PYTHON_OF_VENV) -m ruff check --quiet .
	@$(PYTHON_OF_VENV) -m ruff format --check --quiet .
	@$(PYTHON_OF_VENV) -m mypy
