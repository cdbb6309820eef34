"""What rotation keeps and deletes, and why: a pure function of the records."""

import dataclasses
import json
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit import CheckpointManager
from ckptkit.checkpoint.retention import RetentionPolicy, decide
from ckptkit.errors import UsageError
from ckptkit.formats.own.record import CommitRecord, FileRecord
from tests.checkpoint.states import linear


def record(step: int, nbytes: int = 10, created: float = 0.0, **metrics: float) -> CommitRecord:
    files, save_id = {"f": FileRecord(nbytes, "0" * 16)}, f"{step:016x}"
    kept = {"files": files, "metrics": metrics, "created": created}
    return CommitRecord(step=step, save_id=save_id, state_dict_type="sharded", **kept)


RUN = [record(step) for step in (10, 20, 30, 40, 50)]


SCORED = [record(1, loss=3.0), record(2, loss=1.0), record(3, loss=2.0), record(4), record(5, loss=math.nan)]
SAME = [record(1, loss=1.0), record(2, loss=1.0), record(3)]
GIB = [record(step, 2**30) for step in (1, 2)]
NOON = 20_000 * 86_400 + 43_200  # a noon in UTC
DAYS = [record(step, created=NOON + hours * 3600) for step, hours in enumerate((0, 11.9, 12.1, 60, 61, 62))]


@pytest.mark.parametrize(
    ("run", "policy", "steps"),
    [
        (RUN, {}, [10, 20, 30, 40, 50]),
        (RUN, {"keep_every": 20}, [10, 20, 30, 40, 50]),  # without limits, nothing is deleted
        (RUN, {"keep_best": ("loss", "min")}, [10, 20, 30, 40, 50]),
        (RUN, {"max_num": 2}, [40, 50]),
        (RUN, {"max_num": 1}, [50]),
        (RUN, {"max_num": 9}, [10, 20, 30, 40, 50]),
        (RUN, {"max_num": 1, "keep_every": 20}, [20, 40, 50]),
        (RUN, {"max_mem": 30}, [30, 40, 50]),
        (RUN, {"max_mem": 29}, [40, 50]),
        (RUN, {"max_mem": 5}, [50]),
        (GIB, {"max_mem": "2GiB"}, [1, 2]),
        (GIB, {"max_mem": "2GB"}, [2]),
        ([record(40), record(50), record(30)], {"max_num": 1}, [30]),  # the last of the run, not the highest step
        ([], {"max_num": 1, "max_mem": 1}, []),
        (DAYS, {"max_num": 1, "keep_daily": 1}, [5]),
        (DAYS, {"max_num": 1, "keep_daily": 2}, [2, 5]),
        (DAYS, {"max_num": 1, "keep_daily": 9}, [1, 2, 5]),
        (DAYS, {"max_mem": 1, "keep_daily": 9}, [1, 2, 5]),
        ([record(1), record(2), record(3, created=1e9)], {"max_num": 1, "keep_daily": 5}, [3]),  # no time, no day
        (SCORED, {"max_num": 1, "keep_best": ("loss", "min")}, [2, 5]),
        (SCORED, {"max_num": 1, "keep_best": ("loss", "max", 2)}, [1, 3, 5]),
        (SCORED, {"max_mem": 1, "keep_best": ("loss", "min", 2)}, [2, 3, 5]),
        (SAME, {"max_num": 1, "keep_best": ("loss", "min")}, [2, 3]),  # of equal ones, the newer
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_limits_delete_the_oldest_not_exempt(run, policy, steps):
    assert [d.step for d in decide(run, RetentionPolicy(**policy)) if d.keep] == steps


def test_each_save_warns_once_that_the_newest_checkpoint_is_above_max_mem(tmp_path, caplog):
    with CheckpointManager(tmp_path, retention=RetentionPolicy(max_mem=5)) as manager:
        for step in (1, 2):
            caplog.clear()
            manager.save(step, linear())
            (said,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
            assert "because 1 checkpoint is exempt from the limit" in said and f"step_0000000{step}: the newest" in said


def test_every_decision_has_a_reason():
    decisions = decide(RUN, RetentionPolicy(max_num=2, max_mem=15, keep_every=50))
    assert [d.keep for d in decisions] == [False, False, False, False, True]
    assert decisions[0].reason == "older than the 2 newest (max_num)"
    assert decisions[3].reason == "the total of 20 B exceeds 15 B (max_mem)"
    assert decisions[4].reasons == ("the newest", "a multiple of 50 (keep_every)")
    decisions = decide(DAYS, RetentionPolicy(max_num=1, keep_daily=9))
    assert decisions[0].reason == "older than the newest (max_num)"
    assert decisions[1].reason == "the newest of 2024-10-04 (keep_daily)"


def test_given_limits_keep_the_recorded_exemptions():
    own = RetentionPolicy(max_num=9, keep_every=10, keep_daily=7)
    given = RetentionPolicy(max_num=1, keep_every=20)
    assert given.with_exemptions_of(own) == RetentionPolicy(max_num=1, keep_every=20, keep_daily=7)


def test_a_recorded_policy_is_read_back():
    policy = RetentionPolicy(max_mem="1GB", keep_best=("loss", "min"), keep_daily=7)
    assert policy.max_mem == 10**9
    assert RetentionPolicy.recorded(json.loads(json.dumps(dataclasses.asdict(policy)))) == policy


def test_each_exemption_is_described_in_words():
    policy = RetentionPolicy(keep_every=10, keep_best=("loss", "min"), keep_daily=7)
    assert len(policy.exemptions) == sum(name.startswith("keep_") for name in RetentionPolicy.__slots__)


def test_protected_checkpoints_are_kept_with_their_reason():
    decisions = decide(RUN, RetentionPolicy(max_num=1), protected={"step_00000010": "resumed from", "gone": "x"})
    assert [(d.step, d.reason) for d in decisions if d.keep] == [(10, "resumed from"), (50, "the newest")]


@pytest.mark.parametrize(
    "policy",
    [
        {"max_num": 0}, {"max_num": -1}, {"max_num": True}, {"max_num": 1.5}, {"max_num": "3"}, {"max_mem": 0},
        {"max_mem": -5}, {"max_mem": "lots"}, {"keep_every": 0}, {"keep_every": -100}, {"keep_daily": 0},
        {"keep_best": ("loss",)},
        {"keep_best": ("loss", "lowest")}, {"keep_best": ("loss", "min", 0)}, {"keep_best": ("", "min")},
        {"keep_best": "loss"},
    ],
)  # fmt: skip
def test_an_invalid_policy_is_refused(policy):
    with pytest.raises(UsageError):
        RetentionPolicy(**policy)


runs = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 100), st.floats(allow_nan=True)), unique_by=lambda t: t[0])
policies = st.fixed_dictionaries(
    {},
    optional={
        "max_num": st.integers(1, 5),
        "max_mem": st.integers(1, 300),
        "keep_every": st.integers(1, 20),
        "keep_daily": st.integers(1, 5),
        "keep_best": st.tuples(st.just("loss"), st.sampled_from(["min", "max"]), st.integers(1, 3)),
    },
)


@given(runs, policies, st.sets(st.integers(0, 60)))
def test_the_newest_and_the_protected_are_always_kept_and_the_rest_obeys_the_limits(run, policy, pinned):
    records = [record(step, nbytes, created=9e8 + step * 3e4, loss=loss) for step, nbytes, loss in run]
    protected = {item.name: "pinned" for item in records if item.step in pinned}
    decisions = decide(records, RetentionPolicy(**policy), protected=protected)
    assert [d.name for d in decisions] == [item.name for item in records]
    stay = {d.name for d in decisions if d.keep}
    assert not records or records[-1].name in stay
    assert set(protected) <= stay
    for position, decision in enumerate(decisions):
        newer = len(decisions) - 1 - position
        if decision.keep and "max_num" in policy and newer >= policy["max_num"]:
            assert decision.reasons != ("within the limits",)
        if decision.keep and decision.reasons == ("within the limits",) and "max_mem" in policy:
            assert sum(d.nbytes for d in decisions if d.keep) <= policy["max_mem"]
        if not decision.keep:
            assert "max_num" in policy or "max_mem" in policy


def test_without_limits_no_checkpoint_is_called_within_them():
    records = [record(step, 1) for step in (1, 2)]
    assert [one.reason for one in decide(records, RetentionPolicy())] == ["no limit set", "the newest"]


@given(runs, policies)
def test_deciding_again_deletes_nothing(run, policy):
    records = [record(step, nbytes, created=9e8 + step * 3e4, loss=loss) for step, nbytes, loss in run]
    stay = {d.name for d in decide(records, RetentionPolicy(**policy)) if d.keep}
    again = decide([item for item in records if item.name in stay], RetentionPolicy(**policy))
    assert all(d.keep for d in again)
