"""`ckptkit convert`: any checkpoint into Hugging Face, DCP, torch or LOCAL files."""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli.frame import command_frame, progress_bar, storage_option, with_storage_options
from ckptkit.cli.outcome import outcome_options, show_outcome


@click.command("convert")
@click.argument("src")
@click.argument("dst")
@click.option("--to", type=click.Choice(["hf", "dcp", "torch", "local"]), default="hf", show_default=True)
@click.option("--dtype", default="keep", show_default=True, help="keep, bf16, fp16 or fp32; only floats are cast.")
@click.option("--weights", type=click.Choice(["auto", "model", "master"]), default="auto", show_default=True)
@click.option("--base", metavar="DIR_OR_REPO", help="Gives config, tokenizer and the wanted names, shapes, dtypes.")
@click.option("--key-map", metavar="NAME_OR_FILE", help="A built-in map of names, or a file of rules.")
@click.option("--strip-prefix", metavar="P", help="Remove this in front of every name.")
@click.option("--include", multiple=True, metavar="GLOB", help="Only these tensors; may be given several times.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Not these tensors; may be given several times.")
@click.option("--untie", is_flag=True, help="Keep a head that has diverged from the embedding, and correct the config.")
@click.option("--merge-adapter", is_flag=True, help="Merge LoRA adapters into the weights, as PEFT does.")
@click.option("--layout", metavar="FILE", help="Names and shapes of flat parameters (FSDP1 LOCAL).")
@click.option("--max-shard-size", default="5GB", show_default=True, metavar="SIZE")
@click.option("--world-size", type=click.IntRange(1), help="Ranks to write for (--to dcp, --to local).")
@click.option("--push", metavar="REPO", help="Upload the result to this Hugging Face repo.")
@outcome_options
@storage_option
@command_frame
def command(
    src: str, dst: str, *, push: str | None, as_json: bool, storage_options: tuple[str, ...], **options: Any
) -> None:
    """Convert the checkpoint at SRC and write the result to DST.

    DST appears whole or not at all. Nothing that SRC holds is executed, no GPU, process group or model
    class is needed, and memory stays under --max-memory whatever the size of the model.
    """
    from ckptkit.offline.convert import convert

    with progress_bar("convert") as progress:
        report = convert(src, dst, storage_options=with_storage_options(storage_options), progress=progress, **options)
    show_outcome(report, as_json=as_json, dry_run=options["dry_run"])
    if push and not options["dry_run"]:
        from ckptkit.integrations.hub import push_folder

        url = push_folder(dst, push)
        click.echo(f"pushed to {url}", err=as_json)
