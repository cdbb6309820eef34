"""A real Lightning Trainer on two CPU ranks, which run `lightning_job`; the assertions are here."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not find_spec("lightning") or not find_spec("torchdata"), reason="no lightning, or no torchdata"
    ),
]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("lightning")


@pytest.fixture(scope="module")
def two(framework_ranks, work):
    parts = ("resume", "evaluate", "rotate", "plain_callback", "adapter", "foreign", "pluggable", "failing_logger")
    return framework_ranks.run(_job, 2, str(work), *parts, timeout=240)[0]


@pytest.fixture(scope="module")
def one(framework_ranks, work, two):
    return framework_ranks.run(_job, 1, str(work), "other_world", timeout=120)[0]


def _job(work, *parts):
    from tests.integrations import lightning_job

    return lightning_job.run(work, *parts)


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(two, kind):
    assert two[f"{kind}_bit_equal"]


@pytest.mark.parametrize("kind", ["sharded", "full", "local"])
def test_optimizer_state_is_applied_at_the_first_step_and_freed(two, kind):
    assert two[f"{kind}_deferred"]
    assert two[f"{kind}_moments_at_start"] == 18


def test_a_checkpoint_can_be_used_for_validation_test_and_prediction(two):
    assert two["val_loss"] == two["test_loss"] > 0
    assert two["predicted"] == [2, 3]


def test_the_best_and_the_last_are_kept_and_the_last_is_a_link(two):
    kept = [name for name in two["best_dir"] if name.startswith("step=")]
    assert 2 <= len(kept) <= 3
    assert "step=8.ckpt" in kept
    assert "last.ckpt" in two["best_dir"]
    assert two["best_exists"]


def test_a_removed_checkpoint_is_deleted_and_links_are_not_followed(two):
    assert "step=1.ckpt" not in two["plain_dir"]
    assert two["link"]
    assert two["target_kept"]


def test_a_state_dict_filter_selects_what_is_saved(two):
    assert two["adapter_keys"] == ["model.model.head.bias", "model.model.head.weight"]
    assert two["adapter_resumed"]
    assert two["whole_on_rank_0"] == [True]


def test_a_logger_that_fails_on_rank_0_fails_all_ranks(two):
    first, second = two["logger_errors"]
    assert first == second
    assert "telling the loggers" in first and "the tracking server is down" in first


def test_a_second_parallelize_only_warns(two):
    assert two["second_parallelize_warns"]


@pytest.mark.parametrize("source", ["mp_sharded", "mp_full", "ddp"])
def test_checkpoints_written_by_lightning_are_resumed_from(two, source):
    assert two[f"from_{source}"]


def test_a_lightning_file_is_replaced_after_the_new_checkpoint_is_committed(two):
    assert "last.ckpt" in two["over_a_file"]
    assert not [name for name in two["over_a_file"] if "replaced" in name]


def test_the_callback_saves_under_a_strategy_that_bypasses_checkpoint_io(two):
    assert two["callback_under_model_parallel"]


def test_a_custom_checkpoint_io_receives_whole_tensors_and_resumes(two):
    assert two["io_saw"] == ["io.ckpt"]
    assert two["io_whole"]
    assert two["io_resumed"]


def test_ckptkit_checkpoint_io_rotates_and_resumes_under_ddp(two):
    assert "step=3.ckpt" in two["ddp_kept"]
    assert "step=2.ckpt" not in two["ddp_kept"]
    assert two["ddp_resumed"]


@pytest.mark.parametrize("kind", ["sharded", "full"])
def test_a_run_resumes_on_another_number_of_ranks(one, kind):
    assert one[f"{kind}_step"] == [3, 5]
    assert one[f"{kind}_moments"] == 18
    assert one["weights_equal"]
