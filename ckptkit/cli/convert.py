"""`ckptkit convert`: convert any checkpoint to Hugging Face, DCP, torch or LOCAL files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from ckptkit.cli.frame import command_frame, if_interrupted, is_quiet, storage_options_of_both
from ckptkit.cli.options import Count, GroupedCommand, OneOf, allow_pickle, grouped, layout
from ckptkit.cli.outcome import carry_out, outcome_options, vocabulary_options
from ckptkit.errors import UsageError, command_line
from ckptkit.redact import without_secrets
from ckptkit.storage.store import split_url

_what, _names, _model, _files = grouped("What"), grouped("Names"), grouped("Model"), grouped("Files")
_FULL_NAMES = ("bfloat16", "float16", "float32", "float64", "half", "float", "double")

_OTHER_NAMES = {"safetensors": "hf", "huggingface": "hf", "transformers": "hf", "pt": "torch", "pth": "torch"}


F = TypeVar("F", bound=Callable[..., Any])


def export_options(function: F, *, weights: str = "--weights") -> F:
    """Add the options that select the tensors and files to export.

    Args:
        weights: Name of the option that chooses between model weights and fp32 master weights.
    """
    options = [
        _what(
            "--to",
            type=OneOf(["hf", "dcp", "torch", "local"], meant=_OTHER_NAMES),
            default="hf",
            show_default=True,
            metavar="FORMAT",
            help=(
                "hf (safetensors, config, tokenizer), dcp (torch.distributed.checkpoint), torch (one "
                "torch.save file) or local (one file per rank). All contain only the model; `reshard` keeps "
                "the optimizer."
            ),
        ),
        _what(
            "--dtype",
            type=OneOf(["keep", "bf16", "fp16", "fp32", "fp64"], hidden=_FULL_NAMES),
            default="keep",
            show_default=True,
            metavar="DTYPE",
            help=(
                "keep, bf16, fp16, fp32 or fp64. Only floats are cast; FP8 weights are cast with their scales. Values "
                "beyond the range of the new dtype become infinite, as in torch; a warning counts them."
            ),
        ),
        _what(
            weights,
            type=OneOf(["auto", "model", "master", "ema"]),
            default="auto",
            show_default=True,
            metavar="WHICH",
            help=(
                "model, master (the fp32 copies that some optimizers keep), or ema (the moving average). "
                "auto: master if --dtype casts and there are fp32 copies, otherwise model."
            ),
        ),
        _what("--include", multiple=True, metavar="GLOB", help="Only these tensors; may be given several times."),
        _what("--exclude", multiple=True, metavar="GLOB", help="Not these tensors; may be given several times."),
        _model(
            "--base",
            metavar="DIR_OR_REPO",
            help="Model that provides config, tokenizer and the expected names, shapes and dtypes.",
        ),
        _names("--key-map", metavar="NAME_OR_FILE", help="A built-in key map, or a file of rules (docs/key-maps.md)."),
        _names("--strip-prefix", metavar="P", help="Remove this prefix from every name."),
        _files(
            "--max-shard-size",
            metavar="SIZE",
            help="Maximum size of one file (--to hf). A larger tensor gets its own file. Default: 5GB.",
        ),
        _files("--world-size", type=Count(1), metavar="N", help="Number of ranks to write for (--to dcp, --to local)."),
        _files("--sha256", is_flag=True, help="Write SHA256SUMS next to the files (--to hf)."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


@click.command("convert", cls=GroupedCommand)
@click.argument("src")
@click.argument("dst")
@export_options
@_what(
    "--quantize",
    type=OneOf(["fp8-block"]),
    metavar="HOW",
    help="fp8-block: store linear layers in FP8, with one scale per block of 128 x 128 weights (--to hf).",
)
@vocabulary_options
@_model("--untie", is_flag=True, help="Keep a head that differs from the embedding although the config ties them.")
@_model("--merge-adapter", is_flag=True, help="Merge LoRA adapters into the weights of SRC or --base.")
@_model("--adapter-config", metavar="FILE", help="PEFT's adapter_config.json, if the checkpoint has none.")
@allow_pickle("What")
@layout("Names")
@_files("--push", metavar="REPO", help="Upload the result to this Hugging Face repo.")
@outcome_options
@storage_options_of_both
@command_frame
def command(src: str, dst: str, *, push: str | None, adapter_config: str | None, as_json: bool, **options: Any) -> None:
    """Convert the checkpoint at SRC and write the result to DST.

    DST is published only when it is complete. No code from SRC is executed. No GPU, process group or model class is
    needed. For any model size, the tensor data in memory stays below --max-memory.
    """
    from ckptkit.offline.convert import convert

    if push and options["to"] != "hf":
        raise UsageError(f"--push uploads a Hugging Face export; it cannot be combined with --to {options['to']}.")
    if push and split_url(dst)[0] not in ("file", "local"):
        raise UsageError(f"--push uploads a local directory, but {without_secrets(dst)} is remote. Give a local DST.")
    carry_out(convert, src, dst, as_json=as_json, adapter_config=_adapter_config(adapter_config), **options)
    if push and not options["dry_run"]:
        from ckptkit.integrations.hub import push_folder

        if_interrupted(f"{dst} is complete, but the upload is not. Continue with: {command_line('push', dst, push)}")
        url = push_folder(dst, push, show_progress=not is_quiet())
        click.echo(f"pushed to {url}", err=as_json)


def _adapter_config(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"--adapter-config {path}: {error.strerror}.") from error
    except ValueError as error:
        raise UsageError(f"--adapter-config {path} is not valid JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UsageError(f"--adapter-config {path}: expected a JSON object, as PEFT writes adapter_config.json.")
    return found
