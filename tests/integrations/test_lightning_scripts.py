"""What users' scripts do, under a real Lightning Trainer on two ranks; `lightning_scripts` is what these run."""

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


def test_a_module_that_was_fitted_is_fitted_and_tested_again(found):
    assert found["again_step"] == 2
    assert found["again_tests"]


@pytest.mark.parametrize("step", [4, 6])
def test_a_resume_at_the_end_of_an_epoch_and_within_a_later_one_is_bit_equal(found, step):
    assert found[f"epochs_{step}"]


def test_what_the_run_was_resumed_from_is_not_rotated_away(found):
    assert found["from_before"] == ["step=3.ckpt"]
    assert found["from_after"] == ["step=3.ckpt", "step=6.ckpt"]


def test_two_callbacks_leave_each_others_checkpoints_alone(found):
    assert found["both"] == ["best-step=1.ckpt", "last.ckpt", "recent-step=5.ckpt"]
    assert found["both_best"] == "best-step=1.ckpt"
    assert found["both_best_exists"]


def test_the_last_and_the_best_are_found_by_these_words(found):
    assert found["last_equal"]
    assert found["best_tests"]
    assert found["last_predicts"] == 4


def test_the_link_to_the_last_leaves_alone_what_the_run_was_resumed_from(found):
    assert found["lb"] == ["last-v1.ckpt", "last.ckpt", "step=4.ckpt"]


def test_a_module_whose_state_dict_leaves_weights_out_is_saved_and_resumed_without_them(found):
    assert found["partly_keys"] == (6, False)
    assert found["partly_resumed"]


def test_what_state_dict_hooks_changed_goes_back_through_the_modules_own_hooks(found):
    assert "model.old_head" in found["changed_keys"]
    assert found["changed_resumed"] == []


def test_several_optimizers_are_resumed_bit_equal(found):
    assert found["gan_equal"]
    assert "critic.head.weight" in found["gan_into_one"]


def test_a_save_between_two_steps_of_accumulation_disturbs_nothing(found):
    assert found["mid_save_disturbs_nothing"]
    assert found["mid_resumes_at"] == 4


@pytest.mark.parametrize(
    ("precision", "dtype"), [("bf16-mixed", "float32"), ("bf16-true", "bfloat16"), ("scaler", "float32")]
)
def test_each_precision_is_resumed_bit_equal(found, precision, dtype):
    assert found[f"{precision}_dtype"] == f"torch.{dtype}"
    assert found[f"{precision}_equal"]


def test_the_scale_of_a_grad_scaler_goes_on(found):
    assert found["scale"] == 4096.0


def test_callbacks_that_average_an_unsharded_copy_are_refused(found):
    assert found["ema_fsdp2"].startswith("UsageError: EMAWeightAveraging averages an unsharded copy")


@pytest.mark.parametrize("where", ["ema", "ema_io"])
def test_averaged_weights_and_the_trained_ones_are_both_resumed_under_ddp(found, where):
    assert found[f"{where}_equal"] == (True, True)


@pytest.mark.parametrize("name", ["ddp", "mp"])
def test_what_the_callback_saves_under_a_strategy_of_lightnings_that_strategy_resumes_from(found, name):
    assert found[f"under_{name}_equal"]
    assert found[f"under_{name}_best"]
    assert {"last.ckpt", "step=5.ckpt"} <= set(found[f"under_{name}"])


def test_type_full_gathers_nothing_before_the_save(found):  # NB4
    assert found["full_saw"] == ["DTensor"]


def test_on_request_rank_0_gets_whole_tensors(found):
    assert (found["full_given"], found["full_moments"]) == (6, 6)


def test_a_checkpoint_that_lightning_did_not_write_is_gone_on_from(found):
    assert found["foreign_equal"]


def test_a_modules_own_hooks_get_what_they_saved_and_see_the_weights(found):
    assert found["hook_value"] == (17, ("a", "b"), [0, 1, 2])
    assert found["hook_saw"] == 6


def test_hyperparameters_that_are_not_plain_values_are_saved_as_text(found):
    assert found["hparams_error"] == found["hparams_resume"] == ""
    assert "'where': '/data'" in found["hparams"]
    assert "torch.bfloat16" in found["hparams"]


def test_the_same_step_is_saved_by_two_callbacks_and_at_the_end(found):
    assert found["same_dir"] == ["step=2.ckpt", "step=4-v1.ckpt", "step=4.ckpt"]
    assert found["same_loads"] == 5


def test_weights_alone_are_saved_validated_and_not_trained_on(found):
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


def test_a_run_that_crashed_in_the_middle_goes_on_bit_equal(found):
    assert "the node is gone" in found["crash"]
    assert found["crash_equal"]


def test_names_with_directories_are_rotated_too(found):
    assert found["nest"] == ["step=3/x.ckpt"]
