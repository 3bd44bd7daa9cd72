# Needs python3 (with venv and pip) and, for the native kernels, a C++ compiler. Everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)
ARGS ?=
WORKERS ?= 2
PIP_ARGS ?=

.PHONY: setup demo test lint types tests lab-tests torch-tests sanitize bench clean

setup: .venv/setup.stamp

# torch is named here too: resolved in the same command as the rest, the pin keeps other builds of torch away.
.venv/setup.stamp: pyproject.toml lab/pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/* csrc/*/*)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install --disable-pip-version-check --quiet $(PIP_ARGS) -c constraints.txt '$(TORCH)' -e '.[dev]' -e ./lab
	touch $@

demo: setup
	$(BIN)/gradsync demo $(ARGS)

test: lint types tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal $(ARGS)

lab-tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal lab/tests $(ARGS)

# torch's own tests of DDP, with gradsync in its place and behind its hook; ARGS="--ranks 3" for another number of ranks.
torch-tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/torch_ddp $(ARGS)

# The native code, compiled anew under the address and undefined behaviour sanitizers.
sanitize: setup
	$(BIN)/pytest -n 0 tests/sanitizers $(ARGS)

bench: setup
	$(BIN)/gradsync bench $(ARGS)

clean:
	rm -rf build dist lab/dist demo-out .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv src/gradsync/kernels/*.so src/gradsync/planner/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
