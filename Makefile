# Two commands for a fresh clone: `make demo` runs the main job, `make test` checks every rule once.
PYTHON ?= python3
PIP = .venv/bin/pip install --quiet --disable-pip-version-check -c tests/constraints.txt

# Keep Python's compiled files, even if the shell disables them: otherwise each of hundreds of processes compiles everything.
export PYTHONDONTWRITEBYTECODE =

# Each worker has its own ranks and servers. A free worker takes the next test file, in the order of tests/split.py.
WORKERS ?= 2
PYTEST = .venv/bin/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder --durations 10

# A machine with a GPU may have no network: `make gpu-wheels` fetches what `make gpu WHEELS=...` installs there.
WHEELS ?= build/wheels
GPU_PYTHON_VERSION ?= 3.12
# Python with the torch that `make gpu` tests: python3's, else that of `make test`.
GPU_PYTHON ?= $(shell $(PYTHON) -c "import importlib.util as u; exit(not u.find_spec('torch'))" && echo $(PYTHON) || echo .venv/bin/python)
# `make gpu DEVICE=cpu` runs the same code on the host.
DEVICE ?= cuda

.PHONY: demo test test-night test-ci test-sweeps test-all test-floor test-newest test-torchtitan test-vllm coverage gpu gpu-wheels lint docs clean

demo: .venv/demo.stamp
	.venv/bin/python examples/train_and_export.py

# The tests write thousands of files, so they use memory (/dev/shm) instead of the disk if 4 GB of it are free.
test: export PYTEST_DEBUG_TEMPROOT := $(shell df -Pk /dev/shm 2>&1 | awk 'NR == 2 && $$4 > 4000000 {print "/dev/shm"}')
test: .venv/test.stamp
	$(PYTEST) -m "not night"
	@rmdir $(PYTEST_DEBUG_TEMPROOT)/pytest-of-* 2>/dev/null || true  # empty where all tests passed

# What `make test` leaves out: every kill point, seed and attack, the servers, the browser. tests/split.py says which.
test-night: .venv/test.stamp
	$(PYTEST) -m night

# Before a change lands: each test at least once, without the other cases of the night's sweeps.
test-ci: .venv/test.stamp
	$(PYTEST) -m "not sweep"

# The other cases of the sweeps: together with test-ci, each case of each test once.
test-sweeps: .venv/test.stamp
	$(PYTEST) -m sweep

# Both sets in one run, so that setup that they share is done once.
test-all: .venv/test.stamp
	$(PYTEST)

# The daily set with the lowest versions that pyproject.toml declares, in an environment of its own: Python 3.10 or 3.11,
# as the lowest numpy has no wheel for later ones.
test-floor: .venv-floor/stamp
	.venv-floor/bin/python $(filter-out .venv/bin/python,$(PYTEST)) -m "not night"

# The daily set with the newest version of each dependency, in an environment of its own.
test-newest: .venv-newest/stamp
	.venv-newest/bin/python $(filter-out .venv/bin/python,$(PYTEST)) -m "not night"

.venv-newest/stamp: pyproject.toml
	$(PYTHON) -m venv --clear .venv-newest
	.venv-newest/bin/pip install --quiet --disable-pip-version-check --upgrade -e '.[test]'
	touch $@

.venv-floor/stamp: pyproject.toml tests/floor.py
	$(PYTHON) -m venv --clear .venv-floor
	$(PYTHON) tests/floor.py > .venv-floor/constraints.txt
	.venv-floor/bin/pip install --quiet --disable-pip-version-check -c .venv-floor/constraints.txt -e '.[test]'
	touch $@

# Measure which lines and branches of the package the daily set runs, also in ranks and commands. Takes twice as long.
coverage: .venv/dev.stamp
	rm -rf build/coverage && mkdir -p build/coverage
	.venv/bin/python -m coverage run $(filter-out .venv/bin/python,$(PYTEST)) -m "not night" || echo "some tests failed"
	.venv/bin/python -m coverage combine --quiet
	.venv/bin/python -m coverage report --sort cover > build/coverage/report.txt; tail -1 build/coverage/report.txt

# Needs a CUDA device: the tests in tests/gpu, then the tables of benchmarks/gpu.py. Downloads nothing.
gpu: .venv-gpu/stamp
	.venv-gpu/bin/python -m pytest tests/gpu -v -W default $(if $(filter cuda,$(DEVICE)),-m gpu)
	.venv-gpu/bin/python -m benchmarks.gpu --device $(DEVICE)

# An environment that also sees the packages of another environment. `--system-site-packages` shows only the system's.
define environment_over
	$(1) -m venv --clear --without-pip $(@D)
	$(1) -c "import sys; print(*(p for p in sys.path if p.endswith('-packages')), sep='\n')" \
	  > $$($(@D)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/below.pth
	$(1) -m pip --python $(@D)/bin/python install --quiet --disable-pip-version-check $(2) -r $<
	touch $@
endef

.venv-gpu/stamp: tests/gpu/requirements.txt
	$(call environment_over,$(GPU_PYTHON),--no-index --find-links $(WHEELS))

# torchtitan's own trainer, on the CPU, in an environment over that of `make test`: it needs triton, which is large.
test-torchtitan: .venv-torchtitan/stamp
	.venv-torchtitan/bin/python -m pytest tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_trainer.py

.venv-torchtitan/stamp: tests/integrations/torchtitan.txt .venv/test.stamp
	$(call environment_over,.venv/bin/python,--no-deps)

# vLLM on the CPU. PyPI's torchvision, torchaudio and torchcodec do not work with the CPU build of torch.
test-vllm: .venv-vllm/stamp .venv/test.stamp
	PYTHON_WITH_VLLM=.venv-vllm/bin/python .venv/bin/python -m pytest tests/integrations/test_vllm.py

.venv-vllm/stamp: tests/integrations/vllm.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	$(@D)/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

gpu-wheels:
	$(PYTHON) -m pip download --quiet --disable-pip-version-check --dest $(WHEELS) --only-binary :all: \
	  --python-version $(GPU_PYTHON_VERSION) --implementation cp \
	  $(foreach v,2_28 2_27 2_24 2_17 2_12 2_5,--platform manylinux_$(v)_x86_64) \
	  --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -r tests/gpu/requirements.txt

lint: .venv/dev.stamp
	.venv/bin/ruff format --check . && .venv/bin/ruff check . && .venv/bin/mypy && .venv/bin/lint-imports
	.venv/bin/python tests/import_contracts_negative.py

# Build the site in build/site. A broken link is an error.
docs: .venv/docs.stamp
	.venv/bin/mkdocs build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[hf]'
	touch $@

.venv/test.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[test,optimizers]'
	touch $@

.venv/dev.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[dev]'
	touch $@

.venv/docs.stamp: pyproject.toml tests/constraints.txt | .venv/bin/python
	$(PIP) -e '.[docs]'
	touch $@

clean:
	rm -rf .venv .venv-gpu .venv-floor .venv-newest .venv-torchtitan .venv-vllm
