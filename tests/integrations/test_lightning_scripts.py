"""Typical user scripts under a real Lightning Trainer on two ranks, which run `lightning_scripts`."""

from __future__ import annotations

import pytest

pytest.importorskip("lightning")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.timeout(600)
PARTS = (
    "fit_twice", "epochs", "resumed_from", "two_callbacks", "last_and_best", "own_state_dict", "state_dict_hooks",
    "several_optimizers", "accumulation", "precisions", "averaging", "other_strategies", "full_is_streamed",
    "foreign_weights", "module_hooks", "hyperparameters", "same_step", "weights_only", "wrong_paths", "crash",
    "nested_names",
)  # fmt: skip


@pytest.fixture(scope="module")
def found(framework_ranks, tmp_path_factory):
    return framework_ranks.run(_job, 2, str(tmp_path_factory.mktemp("scripts")), *PARTS, timeout=280)[0]


def _job(work, *parts):
    from tests.integrations import lightning_scripts

    return lightning_scripts.run(work, *parts)


def test_a_trainer_shards_a_second_module_too(found):
    assert found["second_is_sharded"]
    assert found["second_is_same"]


def test_a_fitted_module_can_be_fitted_and_tested_again(found):
    assert found["again_step"] == 2
    assert found["again_tests"]


@pytest.mark.parametrize("step", [4, 6])
def test_a_resume_at_the_end_of_an_epoch_and_within_a_later_one_is_bit_equal(found, step):
    assert found[f"epochs_{step}"]


def test_the_checkpoint_resumed_from_is_not_rotated_away(found):
    assert found["from_before"] == ["step=3.ckpt"]
    assert found["from_after"] == ["step=3.ckpt", "step=6.ckpt"]


def test_two_callbacks_keep_each_others_checkpoints(found):
    assert found["both"] == ["best-step=1.ckpt", "last.ckpt", "recent-step=5.ckpt"]
    assert found["both_best"] == "best-step=1.ckpt"
    assert found["both_best_exists"]


def test_ckpt_path_accepts_last_and_best(found):
    assert found["last_equal"]
    assert found["best_tests"]
    assert found["last_predicts"] == 4


def test_the_link_to_the_last_checkpoint_does_not_replace_the_one_resumed_from(found):
    assert found["lb"] == ["last-v1.ckpt", "last.ckpt", "step=4.ckpt"]


def test_weights_omitted_by_a_modules_state_dict_are_not_saved_or_expected(found):
    assert found["partly_keys"] == (6, False)
    assert found["partly_resumed"]


def test_state_changed_by_state_dict_hooks_is_restored_by_the_modules_hooks(found):
    assert "model.old_head" in found["changed_keys"]
    assert found["changed_resumed"] == []


def test_several_optimizers_are_resumed_bit_equal(found):
    assert found["gan_equal"]
    assert "critic.head.weight" in found["gan_into_one"]


def test_a_save_during_accumulation_does_not_change_training(found):
    assert found["mid_save_disturbs_nothing"]
    assert found["mid_resumes_at"] == 4


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "float32"), ("bf16-true", "bfloat16"), ("scaler", "float32")]
)
def test_each_precision_is_resumed_bit_equal(found, precision, dtype):
    assert found[f"{precision}_dtype"] == f"torch.{dtype}"
    assert found[f"{precision}_equal"]


def test_the_scale_of_a_grad_scaler_is_restored(found):
    assert found["scale"] == 4096.0


def test_callbacks_that_average_an_unsharded_copy_are_refused(found):
    assert found["ema_fsdp2"].startswith("UsageError: EMAWeightAveraging averages an unsharded copy")


@pytest.mark.parametrize("where", ["ema", "ema_io"])
def test_averaged_and_trained_weights_are_both_restored_under_ddp(found, where):
    assert found[f"{where}_equal"] == (True, True)


@pytest.mark.parametrize("name", ["ddp", "mp"])
def test_checkpoints_saved_under_a_lightning_strategy_are_resumed_by_it(found, name):
    assert found[f"under_{name}_equal"]
    assert found[f"under_{name}_best"]
    assert {"last.ckpt", "step=5.ckpt"} <= set(found[f"under_{name}"])


def test_type_full_gathers_nothing_before_the_save(found):  # NB4
    assert found["full_saw"] == ["DTensor"]


def test_state_dict_type_full_gives_rank_0_whole_tensors_on_request(found):
    assert (found["full_given"], found["full_moments"]) == (6, 6)


def test_a_checkpoint_not_written_by_lightning_is_resumed_from(found):
    assert found["foreign_equal"]


def test_module_hooks_get_their_saved_values_and_the_loaded_weights(found):
    assert found["hook_value"] == (17, ("a", "b"), [0, 1, 2])
    assert found["hook_saw"] == 6


def test_hyperparameters_that_are_not_plain_values_are_saved_as_text(found):
    assert found["hparams_error"] == found["hparams_resume"] == ""
    assert "'where': '/data'" in found["hparams"]
    assert "torch.bfloat16" in found["hparams"]


def test_two_callbacks_and_the_end_of_training_may_save_the_same_step(found):
    assert found["same_dir"] == ["step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    assert found["same_loads"] == 5


def test_save_weights_only_checkpoints_validate_and_do_not_resume(found):
    assert "optimizer" not in found["wo_keys"]
    assert found["wo_validates"]
    assert "contains only the model" in found["wo_fit"]


def test_paths_that_are_not_checkpoints_are_refused_by_name(found):
    assert found["no_path"].startswith("CheckpointNotFoundError")
    assert "notes.txt" in found["no_checkpoint"]
    assert found["junk"].startswith("CorruptCheckpointError")


def test_a_folder_that_is_not_a_checkpoint_is_not_overwritten(found):  # P6
    assert found["over_folder"].startswith("CheckpointExistsError")
    assert found["folder_kept"]


def test_a_model_of_another_shape_is_refused_with_every_shape(found):
    assert "[3, 8] in the checkpoint, expected [5, 8]" in found["wide"]
    assert "[3] in the checkpoint, expected [5]" in found["wide"]


def test_a_crashed_run_resumes_bit_equal(found):
    assert "the node is gone" in found["crash"]
    assert found["crash_equal"]


def test_names_with_directories_are_rotated_too(found):
    assert found["nest"] == ["step=3/x.ckpt"]
