# make quickstart   install into .venv and train a small model on real text (two processes)
# make test         install what the tests need and run them: make test PYTEST_ARGS="-k mesh"
# make lint         ruff, mypy and import-linter
# make wheel        build the wheel into dist/
# make clean        remove .venv and everything built

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=

BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install -qq --no-input --disable-pip-version-check -c constraints.txt
# Editable by a path, not by import hooks: Hydra looks for plugins in folders.
EDITABLE := --config-settings editable_mode=compat -e
# What an installation depends on. The code itself is not: it is installed editable.
MANIFEST := pyproject.toml setup.py constraints.txt $(wildcard hydra_plugins)
TYPED := titanplug tests/harness.py tests/conftest.py $(wildcard hydra_plugins)

.PHONY: quickstart test lint ruff types imports wheel clean

quickstart: $(VENV)/.installed
	$(BIN)/titanplug train experiment=quickstart

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: ruff types imports

ruff: $(VENV)/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed-dev
	$(BIN)/mypy $(TYPED)

imports: $(VENV)/.installed-dev
	$(BIN)/lint-imports --no-logo

wheel: $(VENV)/.installed-dev
	$(BIN)/python -m build --wheel

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(MANIFEST) | $(BIN)/python
	$(INSTALL) $(EDITABLE) .
	touch $@

$(VENV)/.installed-test: $(MANIFEST) | $(BIN)/python
	$(INSTALL) $(EDITABLE) '.[test]'
	touch $(VENV)/.installed $@

$(VENV)/.installed-dev: $(MANIFEST) | $(BIN)/python
	$(INSTALL) $(EDITABLE) '.[test,dev]'
	touch $(VENV)/.installed $(VENV)/.installed-test $@
