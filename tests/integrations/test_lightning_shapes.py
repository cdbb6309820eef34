"""Meshes, wrapping and storage under a real Lightning Trainer; the ranks run `lightning_shapes`."""

from __future__ import annotations

import pytest

from ckptkit.storage import open_store
from tests.storage import servers

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return str(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def two(framework_ranks, work):
    return framework_ranks.run(
        _job, 2, work, "recompute", "offload", "compiled", "meta", "arguments", "refusals", timeout=240
    )[0]


@pytest.fixture(scope="module")
def four(framework_ranks, work, two):
    return framework_ranks.run(_job, 4, work, "tensor_parallel", "mesh_of_three", "hybrid", "more", timeout=240)[0]


@pytest.fixture(scope="module")
def two_again(framework_ranks, work, four):
    return framework_ranks.run(_job, 2, work, "fewer", timeout=120)[0]


@pytest.fixture(scope="module")
def remote(framework_ranks, work):
    with servers.moto() as options:
        open_store("s3://lightning", storage_options=options).fs.mkdir("lightning")
        env = {**servers.CREDENTIALS, "AWS_ENDPOINT_URL": options["endpoint_url"]}
        yield framework_ranks.run(_job, 2, work, ("remote", "s3://lightning/run", env), timeout=240)[0]


def _job(work, *parts):
    from tests.integrations import lightning_shapes

    return lightning_shapes.run(work, *parts)


def test_a_run_with_tensor_parallel_ranks_is_resumed_bit_equal(four):
    assert four["tp_equal"]
    assert four["tp_placed"]["model.blocks.1.0.weight"] == "(Shard(dim=0), Shard(dim=1))"
    assert four["tp_placed"]["model.blocks.1.0.bias"] == "(Shard(dim=0), Replicate())"


def test_the_mesh_has_three_dimensions_with_tensor_parallel_innermost(four):
    assert four["tp_mesh"] == ([2, 1, 2], ["data_parallel", "context_parallel", "tensor_parallel"])
    assert four["mesh"][0] == [1, 2, 2]
    assert four["mesh"][1] == [0, 1]
    assert four["mesh_steps"] == 1


def test_ranks_of_one_tensor_parallel_group_draw_the_same_part_of_a_dataset(four):
    assert four["tp_sampler"] == 2


def test_tensor_parallel_ranks_without_a_plan_are_refused(four):
    assert four["tp_without_plan"].startswith("UsageError")
    assert "custom_tp_plan" in four["tp_plan_refused"]


def test_a_run_with_replicas_is_resumed_bit_equal_and_each_shard_is_written_once(four):
    assert four["hsdp_equal"]
    assert four["hsdp_placed"] == "(Replicate(), Shard(dim=0))"
    total = sum(four["hsdp_bytes"])
    assert len(four["hsdp_bytes"]) == 4  # divided among the replicas
    assert max(four["hsdp_bytes"]) < 0.4 * total


def test_a_run_of_two_ranks_resumes_on_four(four):
    assert four["more_equal"]
    assert four["more_step"] == 3


@pytest.mark.parametrize("name", ["tp", "hsdp"])
def test_a_run_of_four_ranks_resumes_on_two(two_again, name):
    assert two_again[f"{name}_step"] == (4, 6, 18)
    assert two_again["tp_into_two"]


def test_offloaded_weights_are_resumed_bit_equal_and_saved_whole(two):  # NB3
    assert two["offload_equal"]
    assert two["offload_on"] == {"cpu"}
    assert two["offload_saved"] == [3, 8]


def test_activation_checkpointing_does_not_change_names(two):
    assert two["calls_with"] == 2 * two["calls_without"]
    assert two["recompute_keys"]
    assert two["recompute_off"]


def test_a_plain_model_loads_the_checkpoint_of_a_compiled_one(two):
    assert two["compiled_off"]


def test_a_model_made_on_the_meta_device_is_resumed_bit_equal(two):
    assert two["meta_equal"]


def test_a_model_created_under_init_module_gets_its_values(two):
    assert two["init_module_on"] == "meta"
    assert two["init_module_finite"]


def test_modules_without_reset_parameters_are_listed_in_a_warning(two):
    assert len(two["odd_warned"]) == 1
    assert "Odd (0.scale)" in two["odd_warned"][0]


def test_arguments_of_nemo_are_accepted(two):
    assert two["own_calls"].count(["Net", "data_parallel", "context_parallel", "tensor_parallel"]) == 1
    assert ["StatefulDataLoader"] in two["own_calls"]


def test_the_parallelize_function_of_nemo_keeps_the_last_block_gathered(two):
    assert two["last_block"] == [False, True]


def test_the_trainer_clips_by_the_norm_over_all_ranks(two):
    assert two["clipped"] == pytest.approx([1e-3, 1e-3], rel=1e-3)


def test_optimizer_state_is_matched_by_name(two):
    assert "model.blocks.0.0.weight" in two["optimizer_keys"]
    assert len(two["optimizer_keys"]) == 6


def test_the_strategy_reduces_and_broadcasts_values(two):
    assert two["reduced"] == 0.5
    assert two["broadcast"] == "from 0"


def test_storage_options_of_a_save_are_refused(two):
    assert two["options_of_a_save"].startswith("UsageError: A save takes no storage_options")


@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "no_shard"])
def test_other_sharding_strategies_give_the_same_weights(two, strategy):
    assert two[strategy]


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("early_optimizer", "sharded"),
        ("fsdp1_model", "FSDP1"),
        ("two_into_one", "optimizer"),
    ],
)
def test_impossible_settings_are_refused_with_a_hint(two, fact, words):
    assert words in two[fact]


def test_a_run_on_s3_is_saved_rotated_resumed_and_tested(remote):
    assert remote["remote_resumed_at"] == 3
    assert remote["remote_equal"]
    assert remote["remote_best"][0].startswith("s3://lightning/run/")
    assert remote["remote_best"][1]
    assert remote["remote_dir"] == ["last.ckpt", "step=4.ckpt"]
    assert remote["remote_local_folder"] == []


def test_resuming_from_an_empty_s3_path_is_an_error(remote):
    assert remote["remote_missing"].startswith("CheckpointNotFoundError")
    assert "s3://lightning/run/nothing.ckpt" in remote["remote_missing"]


def test_a_checkpoint_on_s3_is_removed(remote):
    assert remote["remote_removed"]
