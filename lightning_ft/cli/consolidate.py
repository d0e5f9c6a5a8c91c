"""`lightning-ft consolidate`: one file from whatever a checkpoint is."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from lightning_ft._inspection.consolidate import SUFFIXES, consolidate
from lightning_ft._words import size
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, reported
from lightning_ft.cli.options import AsJson, StorageOptions
from lightning_ft.cli.output import Output, progress_bar
from lightning_ft.storage import Storage


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("consolidate", short_help="One .ckpt or .safetensors from any checkpoint", epilog=EPILOG)(consolidate_)


EPILOG = """\b
FROM                                   OUT.ckpt                OUT.safetensors
a checkpoint of ours                   copied, same manifest   weights (*)
a checkpoint of plain Lightning        copied, new manifest    weights (*)
a directory of shards, of ours         as one file (**),       weights (*)
                                       same manifest
a directory of shards, of Lightning    as one file (**),       weights (*)
                                       new manifest

\b
(*)  needs torch and safetensors; memory: the weights
(**) needs torch; memory: the whole checkpoint

\b
A new manifest makes the file verify itself; ckpt_path="last" does not take
it. Damaged input is refused. OUT appears whole or not at all.

\b
Examples:
  lightning-ft consolidate runs/1/step=00001000.ckpt model.safetensors
  lightning-ft consolidate fsdp/epoch=3.ckpt/ epoch3.ckpt
  lightning-ft consolidate last.ckpt s3://bucket/last.ckpt --force

\b
JSON:
  source, target, size_bytes, manifest (null for .safetensors)

\b
Exit code: 0 if OUT is there; 1 if FROM is damaged or no checkpoint; 2 if
OUT exists, without --force, or is a directory; 3 if there is no FROM; 5 if
the storage fails; 6 if a package is missing.
"""


@reported("consolidate")
def consolidate_(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A checkpoint file, or a directory of shards.")],
    target: Annotated[str, typer.Argument(metavar="OUT", help="What to write: NAME.ckpt or NAME.safetensors.")],
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace OUT if it exists.")] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Write one file from a checkpoint: a .ckpt with a manifest, or its weights alone as .safetensors."""
    chosen = options.storage_options(storage_option)
    storage = Storage(chosen)
    source = options.location(source, chosen, "FROM")
    target = options.location(target, chosen, "OUT")
    if not target.endswith(SUFFIXES):
        raise typer.BadParameter(f"{target} ends in neither {' nor '.join(SUFFIXES)}", param_hint="OUT")
    options.existing(storage, source, "FROM")
    if storage.exists(target):
        if not storage.is_file(target):  # a store would keep both under the one name
            raise typer.BadParameter(
                f"{target} is a directory, which is not replaced: give another name", param_hint="OUT"
            )
        if not force:
            raise typer.BadParameter(f"{target} exists; --force replaces it", param_hint="OUT")
    with progress_bar("reading", as_json) as progress:
        manifest = consolidate(storage, source, target, progress)
    output = Output(as_json)
    size_bytes = storage.size(target)
    output.document(
        "consolidate",
        source=source,
        target=target,
        size_bytes=size_bytes,
        manifest=dataclasses.asdict(manifest) if manifest is not None else None,
    )
    what = "weights only" if manifest is None else f"step {manifest.step}, generation {manifest.generation}"
    output.line(f"{target}: {size(size_bytes)}, {what}", "bold")
    return Code.FINE
