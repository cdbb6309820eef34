# Two commands for a fresh clone: `make demo` runs the main job, `make test` passes the tests.
PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check -c tests/constraints.txt

.PHONY: demo test lint clean

demo: .venv/demo.stamp
	.venv/bin/python examples/train_and_export.py

test: .venv/test.stamp
	.venv/bin/python -m pytest

lint: .venv/dev.stamp
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
	.venv/bin/python tests/import_contracts_negative.py

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[hf]'
	touch $@

.venv/test.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[test]'
	touch $@

.venv/dev.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[dev]'
	touch $@

clean:
	rm -rf .venv
