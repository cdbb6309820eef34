"""A real transformers Trainer and a real Accelerator on two ranks, under DDP and FSDP2; the ranks run `hf_job`."""

from __future__ import annotations

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("torchdata")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return str(tmp_path_factory.mktemp("hf"))


@pytest.fixture(scope="module")
def two(framework_ranks, work):
    parts = [(part, fsdp) for part in ("trainer", "accelerator") for fsdp in (False, True)]
    return framework_ranks.run(_job, 2, work, *parts, timeout=200)[0]


def _job(work, *parts):
    from tests.integrations import hf_job

    return hf_job.run(work, *parts)


@pytest.mark.parametrize(("name", "kind"), [("ddp", "Parameter"), ("fsdp2", "DTensor")])
def test_a_trainers_resumed_run_is_bit_equal(two, name, kind):
    assert two[f"{name}_wrapped"][1] == kind
    assert two[f"{name}_step"] == 3
    assert two[f"{name}_equal"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_from_pretrained_reads_the_export_of_a_sharded_model(two, name):
    assert two[f"{name}_export"]


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_an_accelerators_resumed_run_is_bit_equal_with_its_dataloader_and_accumulation(two, name):
    assert two[f"accelerate_{name}_moments"] == 21
    assert two[f"accelerate_{name}_step"] == (2, 2)
    assert two[f"accelerate_{name}_equal"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_resumes_on_another_number_of_ranks(framework_ranks, two, work, ranks):
    assert framework_ranks.run(_job, ranks, work, ("more",), timeout=100)[0]["resized"] == (3, 8)
