# Every target does its own set-up, on a fresh machine too; the second time that takes no time. `make help` lists them.

PYTHON ?=
MODEL ?= smollm2-135m-instruct
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory

# An editable install links source files one by one (which is what type checkers need), so a file that is new or gone
# must be linked anew. The stamp's name holds a checksum of the list of files: another list, another stamp.
LIST := $(shell find messages actors runtime \( -name '*.py' -o -name '*.cpp' -o -name '*.h' \) | LC_ALL=C sort | cksum | cut -d ' ' -f 1)
INSTALLED := $(VENV)/.installed
LINKED := $(VENV)/.linked-$(LIST)

CPP = $(shell find actors benchmarks \( -name '*.cpp' -o -name '*.h' \))

# The raw text, so that a `$` in a prompt stays one. Only from the command line: some shells export a PROMPT of their own.
ifeq ($(origin PROMPT),command line)
export CUELIGHT_PROMPT := $(value PROMPT)
QUESTION := -- "$$CUELIGHT_PROMPT"
endif

.PHONY: help chat test check stress setup clean

help:
	@echo 'make chat                   talk to a model in the terminal'
	@echo 'make chat PROMPT="..."      answer once and exit; so does: echo "..." | make chat'
	@echo 'make chat MODEL=NAME        a built-in name, a Hugging Face folder, a .gguf file or a hub id'
	@echo 'make test                   run all tests on all cores (ARGS="-k name" for some)'
	@echo 'make check                  ruff, mypy and clang-format'
	@echo 'make stress                 the long forms of some tests: 10,000 histories with crashes, 200 killed processes'
	@echo 'make clean                  remove the virtual environment and everything built'
	@echo 'PYTHON=/path/to/python3     which Python to make the environment with'

chat: setup
	@exec $(BIN)/cuelight chat --model "$(MODEL)" $(ARGS) $(QUESTION)

test: setup
	@$(BIN)/cuelight pull >/dev/null
	@$(BIN)/pytest -n auto --dist worksteal $(ARGS)

check: setup
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing examples/*.py
	@$(BIN)/clang-format --dry-run --Werror $(CPP)

stress: setup
	@CUELIGHT_HISTORIES=10000 CUELIGHT_KILLS=200 $(BIN)/pytest tests/kernel/test_simulation.py tests/kernel/test_placement.py \
		tests/scheduler/test_properties.py tests/cache/test_properties.py $(ARGS)

setup: $(LINKED)

$(INSTALLED): pyproject.toml .ci/setup
	@sh .ci/setup $(VENV) "$(PYTHON)"
	@touch $@

$(LINKED): $(INSTALLED)
	@rm -f $(VENV)/.linked-*
	@sh .ci/setup --link $(VENV)
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
