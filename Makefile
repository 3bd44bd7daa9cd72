# Needs python3 (with venv and pip) and, for the native kernels, a C++ compiler. Everything else goes into .venv.
PYTHON ?= python3
BIN := .venv/bin
TORCH := $(shell grep '^torch==' constraints.txt)
ARGS ?=
WHEELS ?= pure cp311 cp312-abi3
WORKERS ?= 2
WAITING_WORKERS ?= 4
PIP_ARGS ?=
SOAK_MINUTES ?= 10
# Tests start thousands of processes, each of which would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup demo test lint types tests device-tests waiting-tests lab-tests integrations torch-tests sanitize gpu fuzz bench
.PHONY: faults soak wheels wheel-tests docs docs-tests clean

setup: .venv/setup.stamp

# On a terminal pip shows what it fetches and builds; elsewhere, as in logs, only what goes wrong.
QUIETLY := $(shell test -t 2 || echo --quiet)

PIP := $(BIN)/pip install --disable-pip-version-check $(QUIETLY) $(PIP_ARGS) -c constraints.txt

# As pip does with wheels: else each rank compiles modules while training starts, where the environment says
# PYTHONDONTWRITEBYTECODE, as containers do.
COMPILED := $(BIN)/python -m compileall -q

PIP_INTEGRATIONS := $(PIP:.venv/%=.venv-integrations/%)

PIP_DOCS := $(PIP:.venv/%=.venv-docs/%)

# An editable installation lists the modules: it is made anew where some have come, gone or moved.
.venv/modules: FORCE
	@mkdir -p .venv; find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort > $@

FORCE:

# torch is named here too: resolved in the same command as the rest, the pin keeps other builds of torch away.
.venv/package.stamp: .venv/modules pyproject.toml CMakeLists.txt constraints.txt $(wildcard csrc/* csrc/*/*)
	@echo 'Installing gradsync into .venv: pip fetches torch and compiles the native kernels, for some minutes.'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) '$(TORCH)' -e .
	$(COMPILED) src
	touch $@

# The package is there: nothing is compiled again.
.venv/setup.stamp: .venv/package.stamp lab/pyproject.toml
	@echo 'Installing the lab and the tools for development.'
	$(PIP) 'gradsync[dev]' -e ./lab
	$(COMPILED) lab/src
	touch $@ .venv/demo.stamp

.venv/demo.stamp: .venv/package.stamp lab/pyproject.toml
	@echo 'Installing the lab, which has the demo.'
	$(PIP) -e ./lab
	$(COMPILED) lab/src
	touch $@

demo: .venv/demo.stamp
	$(BIN)/gradsync demo $(ARGS)

test: lint types tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: setup
	$(BIN)/mypy

tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "core or not (interpreted or streams or waiting)" $(ARGS)

# What runs on an accelerator, without one: Triton's interpreter, and a model of streams.
device-tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal -m "interpreted or streams" $(ARGS)

# Ranks mostly wait: for others that are lost, for shards, for slow links. So there are more workers than cores.
waiting-tests: setup
	$(BIN)/pytest -n $(WAITING_WORKERS) --dist worksteal -m "waiting and not core" $(ARGS)

lab-tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal lab/tests $(ARGS)

# The adapters with the real frameworks, in an environment of their own that also sees the packages of .venv.
integrations: .venv-integrations/setup.stamp
	.venv-integrations/bin/python -m pytest -n $(WORKERS) --dist loadfile tests/integrations $(ARGS)

.venv-integrations/setup.stamp: .venv/setup.stamp tests/integrations/requirements.txt tests/integrations/without-dependencies.txt
	@echo 'Installing Lightning, Accelerate, Transformers, Ray and TorchRec into .venv-integrations.'
	test -x .venv-integrations/bin/python || $(PYTHON) -m venv .venv-integrations
	echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
		> "$$(.venv-integrations/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages-of-venv.pth"
	$(PIP_INTEGRATIONS) -r tests/integrations/requirements.txt
	$(PIP_INTEGRATIONS) --no-deps -r tests/integrations/without-dependencies.txt
	touch $@

# torch's own tests of DDP, with gradsync in its place and behind its hook; ARGS="--ranks 3" for another number of ranks.
torch-tests: setup
	$(BIN)/pytest -n $(WORKERS) --dist worksteal tests/torch_ddp $(ARGS)

# The native code, compiled anew under the address and undefined behaviour sanitizers.
sanitize: setup
	$(BIN)/pytest -n 0 tests/sanitizers $(ARGS)

# On a machine with a GPU; GRADSYNC_DRY=1 tries the tests themselves on the CPU.
gpu: setup
	$(BIN)/gradsync doctor
	$(BIN)/pytest -v -n $(if $(GRADSYNC_DRY),0,4) --dist worksteal tests/gpu $(ARGS)
	$(if $(GRADSYNC_DRY),,$(BIN)/pytest -n 4 --dist worksteal -m interpreted tests/kernels $(ARGS))

# Random cases for a minute; ARGS="--seconds 3600" for longer. It goes on behind the last seed of its record.
fuzz: setup
	$(BIN)/gradsync fuzz $(ARGS)

bench: setup
	$(BIN)/gradsync bench $(ARGS)

# Random faults for about a minute; ARGS="--seed 7" for others.
faults: setup
	$(BIN)/gradsync faults --count 1000 --limit 60 --jobs $(WORKERS) $(ARGS)

# Training under torchrun with faults, for SOAK_MINUTES; a run that was ended early goes on.
soak: setup
	$(BIN)/gradsync soak --hours $$(awk 'BEGIN { print $(SOAK_MINUTES) / 60 }') --record soak-$(SOAK_MINUTES).jsonl $(ARGS)

# What is published, into dist/: a source distribution, and from it the wheels. Each native one needs its interpreter:
# PYTHON311 and PYTHON312 name them, if python3.11 and python3.12 do not.
wheels:
	@PYTHON='$(PYTHON)' PIP_ARGS='$(PIP_ARGS)' .ci/wheels $(WHEELS)

# What is in dist/, looked at, installed into empty environments and run.
wheel-tests: setup
	$(BIN)/pytest -n 0 tests/wheels $(ARGS)

# The documentation as a site, into build/site. What builds it is in an environment of its own, without gradsync and torch.
docs: .venv-docs/setup.stamp
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo 'The site is in build/site; to read it with its search: $(PYTHON) -m http.server --directory build/site'

.venv-docs/setup.stamp: pyproject.toml constraints.txt
	@echo 'Installing MkDocs into .venv-docs.'
	test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	$(PIP_DOCS) $$(.venv-docs/bin/python -c 'import tomllib; \
		print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

# The site, looked at: every address, and in a browser, if there is one.
docs-tests: setup docs
	$(BIN)/pytest -n 0 tests/site $(ARGS)

clean:
	rm -rf build dist lab/dist demo-out fuzz-out .mypy_cache .pytest_cache .ruff_cache .hypothesis .venv .venv-docs .venv-integrations .venv-wheels src/gradsync/kernels/*.so src/gradsync/planner/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
