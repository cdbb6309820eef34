"""torchtitan's own Trainer on two ranks of the CPU with our checkpointer: killed, resumed, bit-equal."""

import json
import os
import random
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ckptkit import diff, open_checkpoint, verify

pytest.importorskip("torchtitan", reason="needs torchtitan: make test-torchtitan")
pytestmark = pytest.mark.timeout(900)
STEPS = 6


def write_data(folder: Path) -> None:
    """Write a tokenizer and documents, which torchtitan would download."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    chosen = random.Random(0)
    words = ["".join(chosen.choices("abcdefghij", k=chosen.randint(2, 7))) for _ in range(300)]
    texts = [" ".join(chosen.choices(words, k=40)) for _ in range(100)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"]))
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "data").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    (folder / "tokenizer/tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    (folder / "data/data.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))


def run(folder: Path, parallelism: dict[str, Any], kill: int = 0, **checkpoint: Any) -> list[int]:
    """Train on two ranks, which meet in a store of this process; return the exit codes.

    As a launcher does, end the other rank once one has failed.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300))
    arguments = [str(folder), str(STEPS), json.dumps(checkpoint), json.dumps(parallelism), str(kill)]
    shared = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1",
        "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    logs = [(folder / f"log-{rank}-{kill}.txt").open("w+") for rank in range(2)]
    jobs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.integrations.torchtitan_job", *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=log, stderr=log,
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        codes = [job.wait(400) for job in reversed(jobs)][::-1] if not kill else [0, jobs[1].wait(400)]
    finally:
        for job in jobs:
            if job.poll() is None:
                job.kill()
                job.wait()
    if any(codes) and not kill:
        print(*((folder / f"log-{rank}-{kill}.txt").read_text()[-4000:] for rank in range(2)))
    for log in logs:
        log.close()
    return codes


MESHES = {
    "fsdp": {"data_parallel_shard_degree": 2},
    "pp": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "Interleaved1F1B"},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_a_killed_run_of_the_trainer_resumes_bit_equal(tmp_path, mesh):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for folder in (whole, resumed):
        write_data(folder)
    assert run(whole, MESHES[mesh]) == [0, 0]
    assert run(resumed, MESHES[mesh], kill=5, async_mode="async")[1] == -signal.SIGKILL
    assert run(resumed, MESHES[mesh], async_mode="async") == [0, 0]
    assert re.search("loaded step [24] ", (resumed / "log-0-0.txt").read_text())  # the save of step 4 was under way
    last = [str(folder / "checkpoint" / f"step_{STEPS:08}") for folder in (whole, resumed)]
    assert verify(last[1]).ok
    report = diff(*last)
    assert not report.differs, report
    names = set(open_checkpoint(last[0]))
    assert {"model.layers.3.attention.wo.weight", "optimizer.state.layers.3.attention.wo.weight.exp_avg"} <= names
    assert torch.equal(*(open_checkpoint(url)["model.tok_embeddings.weight"].to_torch() for url in last))
