"""Divides the tests into the daily set (`make test`) and the nightly set (`make test-night`).

`.ci/run` runs each test at least once: the daily cases, and the first case of each test that is only nightly. The other
nightly cases are the sweeps (`make test-sweeps`), which CI runs in another job.

`NIGHT` maps a directory, a file or a test (`file::name`) to `every`: every `every`-th case of each test there runs by
day, the others at night. 0 makes the whole test nightly; tests/README.md then lists its rule. The longest matching
path applies. `LONG` lists the files that start first.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

__all__ = ["LONG", "NIGHT", "PARTS", "at_night", "in_order", "only_at_night", "sweeps"]

PARTS = 5  # The seeds of a fuzzer are divided over this many tests; the first one runs by day.

NIGHT: dict[str, int] = {
    # Kills: every kind of kill by day, every kill point at night.
    "tests/checkpoint/test_manager_faults.py::test_a_manager_killed_at_any_file_operation_loses_nothing": 0,
    "tests/checkpoint/test_manager_faults.py::test_a_killed_rank_ends_the_others_and_loses_nothing": 0,
    "tests/checkpoint/test_object_store.py::test_a_kill_at_any_request_loses_nothing_and_leaves_nothing": 0,
    "tests/offline/test_kill_commands.py": 10,
    "tests/offline/test_kill_commands.py::test_a_prune_killed_at_any_file_operation_is_finished_by_the_next": 0,
    "tests/offline/copying/test_resume.py": 4,
    "tests/offline/copying/test_resume.py::test_a_killed_command_continues_and_gives_the_same_tensors": 2,
    "tests/offline/test_copy.py::test_a_copy_killed_at_any_file_operation_leaves_a_valid_run_and_continues": 0,
    # Faults, damage and full disks: one of each kind by day.
    "tests/checkpoint/test_damage.py": 3,
    "tests/checkpoint/test_damage.py::test_no_damage_is_missed_or_loaded_as_good": 9,
    "tests/checkpoint/test_faults.py": 3,
    "tests/checkpoint/test_faults.py::test_an_error_of_any_operation_fails_the_save_or_has_no_effect": 0,
    "tests/checkpoint/test_faults.py::test_one_failing_call_of_a_rotation_leaves_no_half_deleted_checkpoint": 0,
    "tests/checkpoint/test_fresh_start.py": 2,
    "tests/checkpoint/test_fresh_start.py::test_a_copy_without_its_records_is_an_error_on_an_object_store": 0,
    "tests/checkpoint/run/test_coordinator.py": 2,
    "tests/checkpoint/run/test_delete.py": 2,
    "tests/checkpoint/test_manager_faults.py": 3,
    "tests/checkpoint/save/test_full.py": 2,
    "tests/checkpoint/save/test_full.py::test_no_rank_holds_more_than_twice_the_largest_tensor": 0,
    "tests/cli/test_terminal.py": 2,
    "tests/checkpoint/run/test_hold.py::test_a_job_that_ends_without_close_releases_the_lease": 0,
    "tests/formats/test_dcp_mishaps.py": 6,
    "tests/offline/test_reading.py": 8,
    "tests/offline/test_gaps.py": 3,
    "tests/offline/test_merge.py": 3,
    "tests/offline/test_dry_run.py": 3,
    "tests/offline/test_listing.py": 3,
    "tests/offline/export/test_adapters.py": 4,
    "tests/offline/export/test_adapters.py::test_factors_that_do_not_fit_each_other_or_the_config_are_refused": 1,
    "tests/checkpoint/test_order.py": 3,
    "tests/checkpoint/test_mishaps.py::test_a_signal_on_one_rank_saves_once_on_all_at_the_same_step": 3,
    "tests/checkpoint/test_strict.py": 3,
    "tests/checkpoint/test_strict.py::test_every_difference_is_refused_or_reported_as_documented": 1,
    "tests/checkpoint/test_strict.py::test_adapters_alone_are_loaded_by_glob_or_predicate": 1,
    "tests/docs/test_format.py": 3,
    "tests/offline/test_verify.py::test_each_file_of_another_save_is_found": 5,
    "tests/checkpoint/test_alone.py::test_an_error_of_one_rank_is_raised_on_all_and_nothing_is_written": 3,
    "tests/formats/pickles/test_walk.py::test_oversized_containers_are_refused": 4,
    "tests/formats/own/test_record.py::test_a_field_of_a_wrong_type_is_refused": 5,
    "tests/hostile/test_names.py": 4,
    # World sizes, meshes, precisions and optimizers: some combinations by day.
    "tests/checkpoint/test_resume.py": 9,
    "tests/checkpoint/test_resume.py::test_every_mesh_resumes_bit_exactly": 0,
    "tests/checkpoint/test_meshes.py::test_any_mesh_loads_what_any_other_saved": 25,
    "tests/checkpoint/test_meshes.py::test_plain_torch_and_exports_see_whole_tensors": 3,
    "tests/checkpoint/test_meshes.py::test_states_of_own_shards_load_only_if_each_rank_has_the_same_one": 3,
    "tests/checkpoint/state/test_odd_states.py::test_a_state_beside_sharded_parameters_comes_back_with_its_types": 3,
    "tests/checkpoint/test_world_sizes.py": 50,
    "tests/checkpoint/test_earlier.py": 6,
    "tests/checkpoint/test_load_memory.py": 3,
    "tests/checkpoint/test_load_memory.py::test_a_fallback_completes_a_half_loaded_state": 1,
    "tests/checkpoint/test_load_memory.py::test_a_save_does_not_read_its_own_files": 1,
    "tests/checkpoint/test_load_memory.py::test_a_truncated_file_names_a_tensor_that_lacks_bytes": 1,
    "tests/checkpoint/test_load_memory.py::test_damage_is_found_before_anything_changes_with_atomic": 1,
    "tests/checkpoint/test_load_memory.py::test_a_load_that_fails_halfway_on_one_rank_leaves_every_rank_half_loaded": 1,
    "tests/checkpoint/test_load_memory.py::test_ranks_read_only_their_rows_or_check_each_slice_once": 1,
    "tests/checkpoint/test_hidden_values.py": 4,
    "tests/checkpoint/test_hidden_values.py::test_state_dict_hook_output_that_no_load_accepts_is_refused": 1,
    "tests/checkpoint/test_hidden_values.py::test_states_that_no_load_could_give_an_optimizer_are_refused": 1,
    "tests/checkpoint/test_hidden_values.py::test_what_a_hook_changes_in_an_optimizers_state_dict_is_refused": 1,
    "tests/checkpoint/test_optimizers.py": 40,
    "tests/checkpoint/test_optimizers.py::test_an_optimizer_under_fully_shard_resumes_bit_exactly": 200,
    "tests/checkpoint/test_optimizers.py::test_an_optimizer_on_replicas_resumes_bit_exactly": 200,
    "tests/checkpoint/test_optimizers.py::test_state_that_no_load_could_restore_is_refused_by_all": 0,
    "tests/checkpoint/test_optimizers.py::test_reshard_keeps_the_quantized_states_of_flashoptim": 0,
    "tests/checkpoint/test_optimizers.py::test_an_export_has_the_exact_weights_of_flashoptim": 0,
    "tests/checkpoint/test_optimizers.py::test_a_load_into_another_dtype_has_exact_weights": 0,
    "tests/checkpoint/test_optimizers.py"
    "::test_masters_of_flashoptim_take_the_values_of_weights_that_are_loaded_alone": 0,
    "tests/checkpoint/test_quantizing_libraries.py": 0,
    "tests/checkpoint/test_adoption.py": 3,
    "tests/checkpoint/test_chains.py": 20,
    "tests/checkpoint/test_mesh_chains.py": 14,
    "tests/checkpoint/load/test_foreign.py": 4,
    "tests/checkpoint/load/test_key_map.py::test_weights_of_another_model_are_bit_equal": 5,
    "tests/checkpoint/state/test_train_state.py::test_a_checkpoint_of_a_wrapped_model_loads_into_any_other_wrapper": 4,
    "tests/checkpoint/load/test_shared_memory.py": 4,
    "tests/checkpoint/save/test_background.py": 3,
    "tests/checkpoint/save/test_background.py::test_an_unread_background_error_is_printed_at_exit": 0,
    "tests/checkpoint/save/test_background.py::test_a_queued_save_is_completed_after_the_main_thread_ends": 0,
    "tests/checkpoint/save/test_local.py": 3,
    "tests/checkpoint/save/test_replicas.py": 6,
    "tests/checkpoint/test_mapping.py::test_reading_a_float_tensor_does_not_import_torch": 3,
    "tests/checkpoint/load/test_shared_reads.py": 4,
    "tests/checkpoint/load/test_shared_reads.py::test_from_an_object_store_replicas_are_read_once": 0,
    "tests/checkpoint/load/test_shared_reads.py::test_a_rank_that_dies_while_it_sends_fails_the_others": 0,
    "tests/checkpoint/load/test_shared_reads.py"
    "::test_a_rank_that_fails_while_others_send_fails_all_and_ends_no_process": 0,
    "tests/fsdp/test_cross_loads.py": 16,
    "tests/fsdp/test_gradients.py": 8,
    "tests/fsdp/test_gradients.py::test_a_bad_element_on_any_rank_stops_all_ranks": 0,
    "tests/fsdp/test_hf_save.py": 3,
    "tests/fsdp/test_hf_save.py::test_a_sharded_adapter_is_exported_whole": 0,
    "tests/fsdp/test_master_weights.py": 20,
    "tests/fsdp/test_meta.py": 12,
    "tests/fsdp/test_numerics.py": 30,
    "tests/fsdp/test_precision.py": 3,
    "tests/fsdp/test_strategy.py": 20,
    "tests/fsdp/test_strategy.py::test_an_export_that_fails_fails_on_all_ranks_and_leaves_nothing": 0,
    "tests/fsdp/test_tensor_parallel.py": 3,
    "tests/fsdp/test_tensor_parallel.py::test_a_transformers_plan_equals_a_single_process": 0,
    "tests/fsdp/test_wrap.py": 5,
    "tests/gpu": 8,
    "tests/integrations": 6,
    "tests/integrations/test_extras.py": 0,
    "tests/integrations/test_hub.py": 20,
    "tests/integrations/test_transformers.py::test_resume_from_checkpoint_is_respected": 0,
    "tests/integrations/test_lightning.py": 0,
    "tests/integrations/test_lightning_interrupted.py": 0,
    "tests/integrations/test_hf_ranks.py": 0,
    "tests/integrations/test_torchtitan_trainer.py": 0,
    "tests/integrations/test_vllm.py": 0,
    # Sources of every kind, from every system: some by day.
    "tests/formats/test_rank_sources.py": 8,
    "tests/formats/dcp/test_class_records.py": 0,
    "tests/formats/dcp/test_catalog.py::test_a_hundred_thousand_slices_open_without_an_object_for_each": 0,
    "tests/offline/test_chains.py": 12,
    "tests/offline/test_convert.py": 12,
    "tests/offline/test_convert.py::test_every_source_of_the_zoo_becomes_hugging_face_bit_for_bit": 5,
    "tests/offline/test_convert.py::test_other_exports_of_a_source_are_bit_for_bit": 1,
    "tests/offline/test_convert.py::test_invalid_combinations_of_options_are_refused": 1,
    "tests/offline/test_convert.py::test_torch_loads_the_single_file_with_weights_only": 2,
    "tests/offline/test_copy.py::test_a_checkpoint_of_any_format_is_copied_byte_for_byte": 3,
    "tests/offline/export/test_dequantize.py::test_packed_integers_have_the_values_of_compressed_tensors": 7,
    "tests/offline/resharding/test_mesh.py::test_boxes_and_placements_equal_those_of_fsdp2": 3,
    "tests/offline/test_overwrite.py": 20,
    "tests/offline/test_overwrite.py::test_a_foreign_file_in_an_export_is_refused_by_name": 10,
    "tests/offline/test_overwrite.py::test_a_directory_with_files_of_the_user_is_refused_by_name": 1,
    "tests/offline/test_reshard.py": 8,
    "tests/offline/test_reshard.py::test_every_world_size_loads_the_reshard_of_any_other": 20,
    "tests/offline/test_reshard.py::test_the_result_passes_verify_and_keeps_the_fields_of_the_record": 1,
    "tests/offline/test_reshard_foreign.py": 40,
    "tests/offline/test_reshard_foreign.py::test_torch_loads_the_same_values_from_source_and_result": 12,
    "tests/offline/test_vocabulary.py::test_a_reshard_changes_weights_masters_and_moments": 12,
    "tests/offline/test_vocabulary.py::test_an_export_gets_the_requested_number_of_rows": 7,
    "tests/offline/test_inspect.py::test_every_format_can_be_inspected": 4,
    "tests/offline/export/test_dequantize.py::test_dequantizing_does_not_import_torch": 4,
    "tests/offline/test_merge.py::test_quantized_weights_are_dequantized_summed_and_rounded_once": 5,
    "tests/offline/export/test_dequantize.py::test_fp8_blocks_have_the_values_of_transformers": 5,
    "tests/offline/export/test_transformers_names.py::test_some_model_families_are_mapped_without_transformers": 4,
    "tests/keymaps/test_builtin.py::test_the_map_of_a_model_type_gives_the_names_that_transformers_saves": 5,
    "tests/formats/hf/test_many_tensors.py::test_each_additional_tensor_costs_a_bounded_number_of_calls": 3,
    "tests/formats/test_zoo.py": 4,
    "tests/offline/export/test_adapter_merge.py": 18,
    "tests/offline/export/test_adapter_merge.py"
    "::test_a_config_that_peft_cannot_merge_or_that_contradicts_the_tensors_is_refused": 4,
    # Hostile and damaged input: every fifth attack by day, and a fifth of the seeds.
    "tests/fuzz/test_fuzz.py::test_a_damaged_file_is_refused_or_harmless": PARTS,
    "tests/hostile/test_hostile.py": 20,
    "tests/hostile/test_hostile.py::test_every_command_refuses_an_attack_or_is_not_affected": 30,
    "tests/hostile/test_hostile.py::test_a_file_with_an_unknown_class_is_read_only_with_allow_pickle": 1,
    "tests/hostile/test_links.py": 8,
    "tests/hostile/test_secrets.py": 8,
    # Object stores: tests/storage and tests/checkpoint/test_object_store.py on moto by day, all else at night.
    "tests/remote": 0,
    "tests/storage/test_azure.py": 0,
    "tests/storage/test_objects.py::TestGcs": 0,
    "tests/storage/test_objects.py::TestRclone": 0,
    "tests/storage/test_publish.py::test_a_kill_at_any_operation_leaves_the_old_or_the_new": 0,
    "tests/storage/test_retry.py::test_after_a_failure_an_operation_tries_twice_and_the_next_one_is_patient_again": 0,
    "tests/storage/test_gcs.py::test_each_request_of_an_upload_may_fail_once": 0,
    "tests/storage/test_remote_faults.py::test_bytes_are_identical_when_every_third_request_fails": 5,
    "tests/storage/test_remote_faults.py"
    "::test_a_store_does_not_cross_a_fork_and_a_fork_leaves_its_connections_alone": 2,
    "tests/storage/test_remote_faults.py::test_a_silent_server_ends_in_an_error": 0,
    "tests/storage/test_listing.py::test_a_snapshot_lists_and_finds_the_same_files_as_the_store": 2,
    "tests/formats/dcp/test_fill.py": 4,
    "tests/formats/dcp/test_torch_api.py": 40,
    "tests/formats/test_interop.py": 4,
    # Documents, examples and the browser.
    "tests/docs/test_code_blocks.py::test_commands_run_and_print_what_the_page_shows": 12,
    "tests/docs/test_code_blocks.py::test_python_blocks_run": 12,
    "tests/offline/test_pictures.py::test_a_browser_shows_every_bar_and_sends_no_request": 0,
    "tests/offline/test_resume_team.py": 0,
    "tests/offline/test_diff.py::test_memory_does_not_grow_with_the_tensor": 0,
    "tests/test_examples.py::test_the_example_runs": 0,
}


LONG = (
    # These fork the test process, which must have no threads of servers and pools yet.
    "tests/hostile/test_hostile.py",
    "tests/hostile/test_links.py",
    "tests/hostile/test_secrets.py",
    "tests/test_examples.py",
    "tests/integrations/test_lightning.py",
    "tests/remote/test_end_to_end.py",
    "tests/checkpoint/test_faults.py",
    "tests/checkpoint/test_resume.py",
    "tests/integrations/test_hf_ranks.py",
    "tests/fsdp/test_strategy.py",
    "tests/integrations/test_transformers.py",
    "tests/checkpoint/test_world_sizes.py",
    "tests/storage/test_remote_faults.py",
    "tests/offline/test_reshard.py",
    "tests/checkpoint/test_damage.py",
    "tests/fsdp/test_cross_loads.py",
    "tests/integrations/test_hub.py",
)
"""The files that start first, in this order. Most have a few long tests: the last files to run should be short."""


class Test(Protocol):
    """The attributes of a pytest item that are used here."""

    nodeid: str


T = TypeVar("T", bound=Test)


def at_night(items: Iterable[T]) -> list[T]:
    """Return those of `items` (all collected tests) that the nightly set runs."""
    return [item for item, every, number in _numbered(items) if every == 0 or number % every]


def sweeps(items: Iterable[T]) -> list[T]:
    """Return those of `items` (all collected tests) that neither the daily set nor CI runs."""
    return [item for item, every, number in _numbered(at_night(items)) if every or number]


def _numbered(items: Iterable[T]) -> Iterator[tuple[T, int, int]]:
    """Yield each case with the `every` of its test, and its number among the cases of this test."""
    seen: Counter[str] = Counter()
    for item in items:
        test = item.nodeid.partition("[")[0]
        yield item, _every(test), seen[test]
        seen[test] += 1


def only_at_night(file: str) -> bool:
    """Return whether a file has only nightly tests, so that the daily run need not import it."""
    return _every(file) == 0 and not any(place.startswith(f"{file}::") for place in NIGHT)


def in_order(items: Iterable[T]) -> list[T]:
    """Return `items`, the long files first."""
    turns = {file: turn for turn, file in enumerate(LONG)}
    return sorted(items, key=lambda item: turns.get(item.nodeid.partition("::")[0], len(LONG)))


def _every(test: str) -> int:
    place = test
    while place:
        if place in NIGHT:
            return NIGHT[place]
        place = place.rpartition("::" if "::" in place else "/")[0]
    return 1
