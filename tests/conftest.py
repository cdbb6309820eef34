"""Fixtures for all tests: a reused pool of ranks, and the checkpoints of the zoo."""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.leases import lease_tables, release_leases
from tests.split import at_night, in_order, only_at_night, sweeps

# No timed assertions: a busy machine must not turn a test red.
settings.register_profile("night", deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)
settings.register_profile("day", settings.get_profile("night"), max_examples=25)

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# A background job of a script ignores Ctrl-C, and so would all processes that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

DAY = "not night"  # what `make test` selects
ZOO = Path(__file__).parent / "zoo"

gc.disable()  # until collection is done: none of the million objects of modules is garbage


def pytest_configure(config: pytest.Config) -> None:
    """Let Hypothesis try fewer examples by day."""
    settings.load_profile("day" if config.option.markexpr == DAY else "night")


def pytest_collection_finish() -> None:
    """Exclude all loaded objects from later garbage collections, and let all loaded loggers propagate."""
    gc.freeze()  # the objects stay alive anyway
    gc.enable()
    # pytest adds its handlers to each logger that does not propagate, dozens of them torch's, three times a test.
    for logger in list(logging.root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that `make test` leaves to `make test-night`, and those of them that `.ci/run` skips."""
    for item in at_night(items):
        item.add_marker("night")
    for item in sweeps(items):
        item.add_marker("sweep")
    items[:] = in_order(items)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore files with only nightly tests, unless the night runs: some take seconds to import."""
    if config.option.markexpr != DAY or collection_path.suffix != ".py":
        return None
    return only_at_night(collection_path.relative_to(config.rootpath).as_posix()) or None


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Undo `--quiet` and `--verbose` of a command in a test: they set the level of the package's logger."""
    logger = logging.getLogger("ckptkit")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def _sigint() -> Iterator[None]:
    """Fail a test that leaves another SIGINT handler behind: a later test would ignore Ctrl-C and hang."""
    before = signal.getsignal(signal.SIGINT)
    yield
    after = signal.getsignal(signal.SIGINT)
    if after is not before:
        signal.signal(signal.SIGINT, before)
    assert after is before


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """Fail a test that leaves a process group behind: later tests that fork ranks could not make theirs."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("the test left its process group behind")


@pytest.fixture(autouse=True)
def _leases() -> Iterator[None]:
    """Release the leases that a test left open: their heartbeats would log warnings in later tests."""
    before = [set(table) for table in lease_tables()]
    yield
    release_leases(before)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make retries wait for nothing and give up soon."""
    monkeypatch.setattr("ckptkit.storage.retry.WAIT_S", 0.0)
    monkeypatch.setenv("CKPTKIT_STORAGE_TIMEOUT", "3s")


@pytest.fixture(scope="session")
def ranks() -> Iterator[object]:
    """The pool of ranks: `ranks.run(fn, world_size, *args)`."""
    from tests.ranks import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def zoo() -> Path:
    """The folder of checkpoints that other systems wrote; MANIFEST.json has the expected contents."""
    return ZOO
