# Each target only calls a command. `tideline` (jobs/cli), pytest and ruff do the work.
BIN := .venv/bin
INSTALLED := .venv/.installed
# More words for the command, e.g. make test ARGS="-k topics"
ARGS ?=
# Two files of tests at a time, since many tests wait for a broker, a driver or Airflow. Tests of faults run one at a
# time: the platform must notice a fault within seconds, and two drivers on one machine are too slow for that.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder
SLOWEST := --durations 20 --durations-min 5

.DEFAULT_GOAL := help
.PHONY: help install demo up down status doctor test test-long test-faults test-compose test-mutants lint format bench soak clean
.PHONY: compose-up compose-demo compose-down

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  \1@/' | awk -F@ '{ printf "%-14s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## Install all packages into .venv, in the versions of the lock files

$(INSTALLED): requirements.lock requirements-dev.lock pyproject.toml local/install.sh
	@sh local/install.sh
	@touch $@

demo: $(INSTALLED) ## Start everything, send made-up records, and show how live windows become final
	@$(BIN)/tideline demo $(ARGS)

up: $(INSTALLED) ## Start the platform: Kafka broker and Airflow
	@$(BIN)/tideline up $(ARGS)

down: $(INSTALLED) ## Stop the platform and everything it started
	@$(BIN)/tideline down $(ARGS)

status: $(INSTALLED) ## Show the platform's parts, health and memory
	@$(BIN)/tideline status $(ARGS) || true

doctor: $(INSTALLED) ## Check Java, versions, ports, disk and jars
	@$(BIN)/tideline doctor $(ARGS)

test: $(INSTALLED) ## Run all tests except long, faults and compose; needs no running platform
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m "not faults and not compose and not long" $(SIDE_BY_SIDE) $(SLOWEST) $(ARGS)

test-long: $(INSTALLED) ## Simulate days and years, and check how much the platform grows
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m long $(ARGS)

test-faults: $(INSTALLED) ## Kill processes, corrupt files and fill disks, and check that nothing is lost
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m faults $(SLOWEST) $(ARGS)

test-compose: $(INSTALLED) ## Build the containers and break them; needs Docker with Compose v2, but no running platform
	@$(BIN)/pytest -m compose $(SLOWEST) $(ARGS)

test-mutants: $(INSTALLED) ## Break the product in one place at a time, and check that a test fails
	@$(BIN)/tideline jars
	@$(BIN)/python -m tests.mutants $(ARGS)

compose-up: ## Start the platform in containers, and wait until it is healthy
	@sh local/containers/compose.sh build init
	@sh local/containers/compose.sh build
	@sh local/containers/compose.sh up --detach --wait
	@sh local/containers/compose.sh --report

compose-demo: compose-up ## The same as demo, in containers
	@sh local/containers/compose.sh run --rm demo
	@sh local/containers/compose.sh --report

compose-down: ## Stop the containers; ARGS=-v deletes their data, too
	@sh local/containers/compose.sh --profile demo down $(ARGS)

lint: $(INSTALLED) ## Check style, types and imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(INSTALLED) ## Correct the style, where ruff can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure throughput, freshness and recompute, and compare with plain Spark and DuckDB
	@$(BIN)/tideline jars
	@$(BIN)/tideline bench $(ARGS)

soak: $(INSTALLED) ## Run three pipelines for 20 minutes, and check that slices become final in time
	@$(BIN)/tideline jars
	@$(BIN)/tideline soak $(ARGS)

clean: ## Delete lake, topics, Airflow's database and logs (asks first), then .venv and caches
	@test ! -x $(BIN)/tideline || $(BIN)/tideline clean $(ARGS)
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
