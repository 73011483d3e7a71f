# Every target is a thin call: the work is in `tideline` (jobs/cli), pytest and ruff.
BIN := .venv/bin
INSTALLED := .venv/.installed
# More words for the command, e.g. make test ARGS="-k topics"
ARGS ?=
# Two files of tests at a time: many of them wait for a broker, a driver or Airflow. Not the faults: they have to be
# noticed within seconds, and a driver beside another one is slow.
SIDE_BY_SIDE := --numprocesses 2 --dist loadfile --no-loadscope-reorder
SLOWEST := --durations 20 --durations-min 5

.DEFAULT_GOAL := help
.PHONY: help install demo up down status doctor test test-long test-faults test-compose test-mutants lint format bench soak clean
.PHONY: compose-up compose-demo compose-down

help: ## Show what can be made
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/^([a-z-]+):.*## /  \1@/' | awk -F@ '{ printf "%-14s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## Put everything into .venv, as the locks pin it

$(INSTALLED): requirements.lock requirements-dev.lock pyproject.toml local/install.sh
	@sh local/install.sh
	@touch $@

demo: $(INSTALLED) ## Start everything, feed it, and show live windows turn final
	@$(BIN)/tideline demo $(ARGS)

up: $(INSTALLED) ## Start the platform: Kafka broker and Airflow
	@$(BIN)/tideline up $(ARGS)

down: $(INSTALLED) ## Stop the platform and everything it started
	@$(BIN)/tideline down $(ARGS)

status: $(INSTALLED) ## Show the platform's parts, health and memory
	@$(BIN)/tideline status $(ARGS) || true

doctor: $(INSTALLED) ## Check Java, versions, ports, disk and jars
	@$(BIN)/tideline doctor $(ARGS)

test: $(INSTALLED) ## Run all tests but the faults; needs no running platform
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m "not faults and not compose and not long" $(SIDE_BY_SIDE) $(SLOWEST) $(ARGS)

test-long: $(INSTALLED) ## Simulate days and years: whether the platform grows as it should
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m long $(ARGS)

test-faults: $(INSTALLED) ## Kill, corrupt and starve it, and check that nothing is lost
	@$(BIN)/tideline jars
	@$(BIN)/pytest -m faults $(SLOWEST) $(ARGS)

test-compose: $(INSTALLED) ## Build the containers and break them; needs Docker with Compose v2, and nothing that runs
	@$(BIN)/pytest -m compose $(SLOWEST) $(ARGS)

test-mutants: $(INSTALLED) ## Break the product in one place at a time, and check that tests object
	@$(BIN)/tideline jars
	@$(BIN)/python -m tests.mutants $(ARGS)

compose-up: ## Start the platform in containers, and wait until it is well
	@sh local/containers/compose.sh build init
	@sh local/containers/compose.sh build
	@sh local/containers/compose.sh up --detach --wait
	@sh local/containers/compose.sh --report

compose-demo: compose-up ## Start it in containers, feed it, and show live windows turn final
	@sh local/containers/compose.sh run --rm demo
	@sh local/containers/compose.sh --report

compose-down: ## Stop the containers; with ARGS=-v their data goes, too
	@sh local/containers/compose.sh --profile demo down $(ARGS)

lint: $(INSTALLED) ## Check style, types and who may import whom
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(INSTALLED) ## Mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## Measure throughput, freshness and recompute beside plain Spark and DuckDB
	@$(BIN)/tideline jars
	@$(BIN)/tideline bench $(ARGS)

soak: $(INSTALLED) ## Run three pipelines for 20 minutes: does the tide line keep up?
	@$(BIN)/tideline jars
	@$(BIN)/tideline soak $(ARGS)

clean: ## Delete lake, topics, Airflow's database and logs (asks first), then .venv and caches
	@test ! -x $(BIN)/tideline || $(BIN)/tideline clean $(ARGS)
	@rm -rf .venv .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
