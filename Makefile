# The one front door. A fresh clone needs Python 3.11+, Java 17 and Maven; everything else is installed into .venv.
# Options of the command go into ARGS: make up ARGS="--port 9000". JOBS: how many test files run side by side.

PYTHON ?= python3
BIN    := .venv/bin
LOCKED := .venv/.locked
ARGS   ?=
JOBS   ?= 2

.DEFAULT_GOAL := help
.PHONY: help up down test check soak bench docs format lock env clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 10

up: $(LOCKED)  ## start everything; Ctrl-C stops it
	@exec $(BIN)/millstream up $(ARGS)

down: $(LOCKED)  ## stop what `make up ARGS=--detach` started
	@exec $(BIN)/millstream down $(ARGS)

test: $(LOCKED)  ## every test but the long ones
	$(BIN)/pytest -q -m "not soak" -n $(JOBS) --dist loadfile $(ARGS)

check: $(LOCKED)  ## format, lint, types, layers
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

soak: $(LOCKED)  ## the long tests
	$(BIN)/pytest -q -s -m soak $(ARGS)

bench: $(LOCKED)  ## what the pipeline adds to the time to first token
	@exec $(BIN)/millstream bench pipeline $(ARGS)

docs: $(LOCKED)  ## links, commands and settings that the documents name
	$(BIN)/pytest -q tests/unit/test_millstream_docs.py

format: $(LOCKED)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

env: $(LOCKED)  ## only install what is needed

lock: $(LOCKED)  ## choose the newest versions that fit together
	PATH="$(PATH):$(BIN)" uv pip compile pyproject.toml build.in --all-extras --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --upgrade --quiet --output-file requirements.lock

clean:  ## remove what can be made again; .millstream stays
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(LOCKED): requirements.lock pyproject.toml .ci/environment
	@.ci/environment "$(PYTHON)" .venv
	@touch $@
