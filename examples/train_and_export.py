"""The main example, end to end: train with FSDP2, save, stop, resume bit-exactly, export, reshard, continue.

    python examples/train_and_export.py                                 # starts the ranks itself; needs '.[hf]'
    torchrun --nproc-per-node 2 examples/train_and_export.py            # the same

A small Llama with random weights learns a short text on the CPU, with bf16 compute over fp32 weights, AdamW and a
warm-up schedule. Where the output says "fresh processes", a new `torchrun` has started, which has only the files of
the previous one. `train()` contains all the code that a training script needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEPS, STOP_AT, SAVE_EVERY, MORE = 20, 10, 5, 4
TEXT = Path(__file__).parent / "data" / "lighthouse.txt"


# --- the training script


def train(run: Path, assets: Path, *, until: int) -> tuple[Any, Any]:
    """Resume from the checkpoints in `run`, train to step `until`, and save. Return (state, model)."""
    import torch
    import torch.distributed as dist
    from transformers import AutoConfig, AutoModelForCausalLM

    from ckptkit import CheckpointManager, RetentionPolicy, TrainState
    from ckptkit.fsdp import FSDPConfig, FSDPStrategy

    strategy = FSDPStrategy(FSDPConfig(mixed_precision="bf16", transformer_layer_cls="LlamaDecoderLayer"), max_norm=1.0)
    strategy.setup_distributed()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(assets), dtype=torch.float32)
    model = strategy.prepare_model(model)
    optimizer = strategy.create_optimizer(model, lr=3e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    tokens = torch.load(assets / "tokens.pt", weights_only=True)
    torch.manual_seed(1 + dist.get_rank())  # each rank draws its own batches; a resume restores the generator

    state = TrainState(model=model, optimizer=optimizer, scheduler=scheduler, extra={"losses": []})
    with CheckpointManager(str(run), retention=RetentionPolicy(max_num=2), side_files=str(assets)) as manager:
        manager.load(state)  # the newest committed checkpoint, from any number of ranks
        for step in range(state.step + 1, until + 1):
            starts = torch.randint(0, len(tokens) - 64, (4,))
            batch = torch.stack([tokens[start : start + 64] for start in starts])
            loss = model(input_ids=batch, labels=batch).loss
            strategy.backward(loss, model, optimizer)
            strategy.optimizer_step(optimizer, model, scheduler)
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            state.step = step
            state.extra["losses"].append(mean.item())
            if step % SAVE_EVERY == 0 or step == until:
                manager.save(step, state)
    return state, model


# --- each torchrun runs one part of the example, and writes the results to a small JSON file


def part(name: str, work: Path) -> None:
    """Run one part on this rank: "first", "resumed" or "more"."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    assets, facts = work / "assets", {}
    if name == "first":
        state, _ = train(work / "straight", assets, until=STEPS)
        facts["straight"] = fingerprint(state)
        state, _ = train(work / "run", assets, until=STOP_AT)
        facts["stopped_at"] = state.step
    elif name == "resumed":
        state, model = train(work / "run", assets, until=STEPS)
        facts["resumed"] = fingerprint(state)
        torch.save(logits(model, assets), work / f"logits-{dist.get_rank()}.pt")
    else:
        if dist.is_torchelastic_launched() and int(os.environ["RANK"]) == 0:
            facts["logits_equal"] = exported_logits_equal(work)
        state, _ = train(work / "three", assets, until=STEPS + MORE)
        facts["more"] = {"step": state.step, "losses": state.extra["losses"]}
    if int(os.environ["RANK"]) == 0:
        (work / f"{name}.json").write_text(json.dumps(facts))
    if dist.is_initialized():
        dist.destroy_process_group()


def fingerprint(state: Any) -> dict[str, Any]:
    """Return a digest of the weights, a digest of the optimizer state, and the losses. All ranks must call it."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.tensor import DTensor

    def digest(tree: Any) -> str:
        sha = hashlib.sha256()
        stack = [("", tree)]
        while stack:
            key, value = stack.pop()
            if isinstance(value, dict):
                stack += [(f"{key}.{k}", value[k]) for k in sorted(value, key=str)]
            elif hasattr(value, "shape"):
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                sha.update(key.encode())
                sha.update(whole.detach().cpu().contiguous().numpy().tobytes())
        return sha.hexdigest()

    weights = digest(get_model_state_dict(state.model))
    moments = digest(get_optimizer_state_dict(state.model, state.optimizer)["state"])
    return {"weights": weights, "moments": moments, "losses": [loss.hex() for loss in state.extra["losses"]]}


def logits(model: Any, assets: Path) -> Any:
    """Return the logits of the first tokens of the text, computed in bf16 as in training."""
    import torch

    tokens = torch.load(assets / "tokens.pt", weights_only=True)[:48].unsqueeze(0)
    model.eval()
    with torch.no_grad():
        return model(input_ids=tokens).logits


def exported_logits_equal(work: Path) -> bool:
    """Load the export with `from_pretrained`, and compare its logits with the trained model's, bit by bit."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    export = work / "export"
    AutoTokenizer.from_pretrained(export)
    model = AutoModelForCausalLM.from_pretrained(export, dtype=torch.bfloat16)
    trained = torch.load(work / "logits-0.pt", weights_only=True)
    return torch.equal(logits(model, work / "assets").to(trained.dtype), trained)


# --- the parts in order


def story(work: Path) -> int:
    """Run all parts and print their results. Return the exit code."""
    began = time.monotonic()
    make_assets(work / "assets")
    first = launch("first", work, ranks=2)
    straight, run = first["straight"], work / "run"
    losses = [float.fromhex(loss) for loss in straight["losses"]]
    say(f"trained {STEPS} steps on 2 ranks without a stop: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    say(f"trained again, stopped after step {first['stopped_at']}: kept {', '.join(steps_of(run))}")
    resumed = launch("resumed", work, ranks=2)["resumed"]
    same = {what: resumed[what] == straight[what] for what in ("weights", "moments", "losses")}
    say(f"resumed in fresh processes to step {STEPS}: {verdicts(same)}")
    say(f"kept {', '.join(steps_of(run))}: the newest 2, and the one that was resumed from")
    command(work, "convert", run, work / "export", "--to", "hf", "--verify")
    command(work, "reshard", run / f"step_{STEPS:08d}", work / "three" / f"step_{STEPS:08d}", "--world-size", "3")
    more = launch("more", work, ranks=3)
    same["logits"] = more["logits_equal"]
    say(f"from_pretrained(export) loads, with its tokenizer: {verdicts({'logits': same['logits']})}")
    tail = more["more"]["losses"][STEPS:]
    say(f"went on from the resharded checkpoint on 3 ranks to step {more['more']['step']}: loss {tail[-1]:.3f}")
    say(f"done in {time.monotonic() - began:.0f} s; files in {work}")
    return 0 if all(same.values()) and len(tail) == MORE else 1


def make_assets(assets: Path) -> None:
    """Write a tokenizer trained on the text, the config of a small Llama, and the tokens of the text."""
    import numpy as np
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    assets.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(TEXT)], trainer)
    tokenizer.save(str(assets / "tokenizer.json"))
    (assets / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 400, "hidden_size": 128}
    config |= {"intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"max_position_embeddings": 256, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 0}
    (assets / "config.json").write_text(json.dumps(config, indent=2))
    (assets / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0}))
    ids = tokenizer.encode(TEXT.read_text()).ids
    torch.save(torch.from_numpy(np.array(ids, np.int64)), assets / "tokens.pt")


def launch(name: str, work: Path, *, ranks: int) -> dict[str, Any]:
    """Run one part under torchrun and return its results."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "MASTER_", "RANK", "LOCAL_", "WORLD"))
    }
    environment = {**inherited, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    arguments = ["--standalone", "--nproc-per-node", str(ranks), __file__, "--part", name, "--work", str(work)]
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], env=environment, check=True)
    return json.loads((work / f"{name}.json").read_text())


def command(work: Path, *arguments: str | Path) -> None:
    """Run `ckptkit` as in a shell. Print the command, with paths relative to `work`, and the line with the proof."""
    done = subprocess.run(
        [sys.executable, "-m", "ckptkit", *map(str, arguments)], capture_output=True, text=True, check=False
    )
    shown = " ".join(str(a.relative_to(work)) if isinstance(a, Path) else a for a in arguments)
    if done.returncode:
        raise SystemExit(f"ckptkit {shown} failed with {done.returncode}:\n{done.stderr}")
    proof = next(line for line in done.stdout.splitlines() if line.startswith("proved"))
    say(f"ckptkit {shown}: {proof}")


def steps_of(run: Path) -> list[str]:
    return sorted(p.name for p in run.iterdir() if p.name.startswith("step_"))


def verdicts(same: dict[str, bool]) -> str:
    return ", ".join(f"{what} {'bit-equal' if equal else 'DIFFER'}" for what, equal in same.items())


def say(text: str) -> None:
    print(f"· {text}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="Where the files go; default: a folder in the temporary directory.")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        part(options.part, options.work)
        return 0
    if int(os.environ.get("RANK", "0")) != 0:
        return 0  # under torchrun, only rank 0 goes on: it starts new ranks for each part
    # Each run uses a new folder, so that a second demo on this machine does not delete the files of the first.
    return story(options.work or Path(tempfile.mkdtemp(prefix="ckptkit-demo-")))


if __name__ == "__main__":
    sys.exit(main())
