# Two commands for a fresh clone: `make demo` runs the main job, `make test` checks every rule once.
PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check -c tests/constraints.txt

# Two workers, each with its own ranks and servers; what one has not begun the other takes.
PYTEST = .venv/bin/python -m pytest --numprocesses 2 --dist loadfile --durations 10

.PHONY: demo test test-night test-ci test-all lint docs clean

demo: .venv/demo.stamp
	.venv/bin/python examples/train_and_export.py

test: .venv/test.stamp
	$(PYTEST) -m "not night"

# What `make test` leaves out: every kill point, seed and attack, the servers, the browser. tests/split.py says which.
test-night: .venv/test.stamp
	$(PYTEST) -m night

# What CI runs: each test at least once, without the other cases of the night's sweeps.
test-ci: .venv/test.stamp
	$(PYTEST) -m "not sweep"

# One run, not one after the other: what tests of both halves set up together is set up once.
test-all: .venv/test.stamp
	$(PYTEST)

lint: .venv/dev.stamp
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
	.venv/bin/python tests/import_contracts_negative.py

# The site, in build/site; a link that leads nowhere is an error.
docs: .venv/docs.stamp
	.venv/bin/mkdocs build

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

.venv/docs.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv
