"""`lightning-ft show`: what is in a checkpoint, without loading it and without executing anything in it."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from lightning_ft._inspection.contents import Contents, TensorInPieces, read_contents, read_table
from lightning_ft._inspection.descriptions import Name, Placeholder, StorageDescription, TensorDescription, dotted
from lightning_ft._names import KEY
from lightning_ft._words import size
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, reported
from lightning_ft.cli.options import AsJson, StorageOptions
from lightning_ft.cli.output import Output, count
from lightning_ft.manifest import Manifest
from lightning_ft.storage import Storage

_UNKNOWN_SHOWN = 10
_LONGEST_VALUE = 100
_MODEL = "state_dict"
# Keys whose tensors are many and small, and nobody's who asks what a model is like.
_ASIDE = ("callbacks", "loops", KEY)


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("show", short_help="Manifest, tensors and sizes of one checkpoint", epilog=EPILOG)(show)


EPILOG = """\b
Objects of classes that are not plain data appear as <module.Class>: the
class is not imported. Sizes count each storage once, at the first key that
holds it. Of a directory of shards its files, and the tensors in them by the
names that torch.distributed.checkpoint gives them.

\b
Examples:
  lightning-ft show runs/1/step=00001000.ckpt
  lightning-ft show runs/1/step=00001000.ckpt --all --values
  lightning-ft show s3://bucket/run1/step=00001000.ckpt --only state_dict
  lightning-ft show epoch=3.ckpt --json | jq '.tensors[].name'

\b
JSON:
  path, size_bytes, step, epoch, manifest (null: not ours), totals: [key,
  size_bytes, tensors, values], tensors: [name, dtype, shape, size_bytes,
  record], values: [name, value] (with --values), placeholders: [name]; of a
  directory, after manifest: files: [name, size_bytes, digest], tensors: [name,
  dtype, shape, size_bytes, pieces]

\b
Exit code: 0 if it could be read; 1 if it is damaged where it was read (for
the whole of it: lightning-ft verify); 3 if there is no such file.
"""


@reported("show")
def show(
    url: Annotated[str, typer.Argument(metavar="FILE", help="A checkpoint: ours or of plain Lightning, path or URL.")],
    only: Annotated[
        str | None, typer.Option(metavar="KEY", help="Only what is under this key: state_dict, optimizer_states.0, ...")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Tensors of callbacks, loops and lightning_ft, too: random state, metrics.")
    ] = False,
    values: Annotated[bool, typer.Option("--values", help="Numbers, strings and other values, too.")] = False,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Show manifest, topology, and the tensors of a checkpoint with shapes, dtypes and sizes.

    Reads the table of contents and the pickle, not the tensors.
    """
    chosen = options.storage_options(storage_option)
    path = options.location(url, chosen, "FILE")
    storage = Storage(chosen)
    options.existing(storage, path, "FILE", "file")
    if storage.is_sharded(path):
        if values:
            raise typer.BadParameter(f"{path} is a directory: its tensors and files are shown", param_hint="--values")
        tensors = read_table(storage, path)
        chosen_tensors = [tensor for tensor in tensors if _is_under(tensor.name, only)]
        if not chosen_tensors and only is not None:
            keys = ", ".join(sorted({tensor.name.partition(".")[0] for tensor in tensors}))
            raise typer.BadParameter(f"{path} has no key {only}; at the top there are {keys}", param_hint="--only")
        _show_directory(Output(as_json), storage, path, chosen_tensors)
        return Code.FINE
    if not storage.is_file(path):
        raise typer.BadParameter(f"{path} is a directory: lightning-ft list shows its checkpoints", param_hint="FILE")
    contents = read_contents(storage, path)
    leaves = [(dotted(key), leaf) for key, leaf in contents.leaves]
    if only is not None:
        leaves = [(name, leaf) for name, leaf in leaves if _is_under(name, only)]
        if not leaves:
            keys = ", ".join(sorted({dotted(key[:1]) for key, _ in contents.leaves if key}))
            raise typer.BadParameter(f"{path} has no key {only}; at the top there are {keys}", param_hint="--only")
    _answer(Output(as_json), contents, leaves, with_values=values, everything=everything or only is not None)
    return Code.FINE


def _is_under(name: str, key: str | None) -> bool:
    return key is None or name == key or name.startswith(f"{key}.")


def _answer(
    output: Output, contents: Contents, leaves: list[tuple[str, Any]], with_values: bool, everything: bool
) -> None:
    tensors = [(name, leaf) for name, leaf in leaves if isinstance(leaf, TensorDescription)]
    others = [(name, leaf) for name, leaf in leaves if not isinstance(leaf, TensorDescription)]
    totals = _totals(contents)
    manifest = contents.manifest
    output.document(
        "show",
        path=contents.path,
        size_bytes=contents.size_bytes,
        step=contents.step,
        epoch=contents.epoch,
        manifest=dataclasses.asdict(manifest) if manifest is not None else None,
        totals=totals,
        tensors=[
            {
                "name": name, "dtype": t.dtype, "shape": list(t.shape), "size_bytes": t.size_bytes,
                "record": f"data/{t.storage.key}",
            }
            for name, t in tensors
        ],
        **({"values": [{"name": name, "value": jsonable(leaf)} for name, leaf in others]} if with_values else {}),
        placeholders=sorted(contents.unknown),
    )  # fmt: skip
    output.line(contents.path, "bold")
    output.line()
    output.table(("what", "value"), _facts(manifest, contents.size_bytes, contents.step, contents.epoch))
    output.line()
    output.table(
        ("key", "size", "tensors", "values"),
        [[t["key"], size(t["size_bytes"]), str(t["tensors"]), str(t["values"])] for t in totals],
        frozenset({"size", "tensors", "values"}),
    )
    output.line()
    # The model first; a stable sort, so that the rest is in the order of the file.
    ordered = sorted(tensors, key=lambda tensor: tensor[0].partition(".")[0] != _MODEL)
    shown = [tensor for tensor in ordered if everything or tensor[0].partition(".")[0] not in _ASIDE]
    output.table(
        ("tensor", "dtype", "shape", "size"),
        [[name, t.dtype, _shape(t.shape), size(t.size_bytes)] for name, t in shown],
        frozenset({"size"}),
        shortened="tensor",
    )
    if len(shown) < len(ordered):
        keys = dict.fromkeys(name.partition(".")[0] for name, _ in ordered if name.partition(".")[0] in _ASIDE)
        output.line(f"and {count(len(ordered) - len(shown), 'more tensor')} ({', '.join(keys)}): --all", "dim")
    if with_values:
        output.line()
        output.table(("value", ""), [[name, short(leaf)] for name, leaf in others], shortened="value")
    if contents.unknown:
        names = sorted(contents.unknown)
        more = f" and {len(names) - _UNKNOWN_SHOWN} more" if len(names) > _UNKNOWN_SHOWN else ""
        output.line()
        output.line(f"not imported: {', '.join(names[:_UNKNOWN_SHOWN])}{more}", "yellow")


def _show_directory(output: Output, storage: Storage, path: str, tensors: list[TensorInPieces]) -> None:
    """The files of a sharded checkpoint, and the tensors that are spread over them."""
    manifest, size_bytes = storage.read_manifest(path)
    sizes = storage.sizes(path)
    step, epoch = (None, None) if manifest is None else (manifest.step, manifest.epoch)
    digests = {} if manifest is None else {name: record.digest for name, record in manifest.files.items()}
    output.document(
        "show",
        path=path,
        size_bytes=size_bytes,
        step=step,
        epoch=epoch,
        manifest=dataclasses.asdict(manifest) if manifest is not None else None,
        files=[{"name": n, "size_bytes": sizes[n], "digest": digests.get(n)} for n in sorted(sizes)],
        tensors=[
            {"name": t.name, "dtype": t.dtype, "shape": list(t.shape), "size_bytes": t.size_bytes, "pieces": t.pieces}
            for t in tensors
        ],
    )
    output.line(path, "bold")
    output.line()
    output.table(("what", "value"), _facts(manifest, size_bytes, step, epoch))
    output.line()
    output.table(
        ("file", "size", "digest"),
        [[name, size(sizes[name]), digests.get(name) or "-"] for name in sorted(sizes)],
        frozenset({"size"}),
    )
    output.line()
    output.table(
        ("tensor", "dtype", "shape", "size", "pieces"),
        [[t.name, t.dtype, _shape(t.shape), size(t.size_bytes), str(t.pieces)] for t in tensors],
        frozenset({"size", "pieces"}),
        shortened="tensor",
    )
    output.line()
    output.line("the tensors are spread over the files; lightning-ft consolidate makes one file of them", "dim")


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def _facts(manifest: Manifest | None, size_bytes: int, step: int | None, epoch: int | None) -> list[list[str]]:
    facts = [["size", size(size_bytes)]]
    if manifest is None:
        facts.append(["manifest", "none: written by plain Lightning or another tool"])
        for name, value in (("step", step), ("epoch", epoch)):
            facts.append([name, "-" if value is None else str(value)])
        return facts
    facts += [
        ["step", f"{manifest.step} (batch {manifest.batch}, epoch {manifest.epoch})"],
        ["saved after", {"step": "a step", "epoch": "an epoch"}.get(manifest.boundary, "no boundary: in the middle")],
        ["saved because", manifest.reason],
        ["saved at", manifest.created],
        ["run", f"{manifest.run_id or 'none'}, start {manifest.start}"],
        ["generation", manifest.generation],
        ["continues", manifest.parent or "nothing: the run began here"],
        ["topology", _pairs(manifest.topology)],
        ["written by", _pairs(manifest.versions)],
        ["cost", ", ".join(f"{n[:-5]} {v * 1000:.1f} ms" for n, v in _timings(manifest))],
        ["digest", f"{manifest.digest} of {manifest.size_bytes} bytes"],
    ]  # fmt: skip
    return [fact for fact in facts if fact[1]]


def _timings(manifest: Manifest) -> list[tuple[str, float]]:
    """Those that are numbers; no reader relies on it."""
    return [(n, v) for n, v in manifest.metrics.items() if n.endswith("_secs") and isinstance(v, (int, float))]


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _totals(contents: Contents) -> list[dict[str, Any]]:
    """Per key at the top: bytes of storages not counted before, tensors, and other values."""
    totals: dict[str, dict[str, Any]] = {}
    counted: set[str] = set()
    for key, leaf in contents.leaves:
        name = dotted(key[:1]) if key else "(all)"
        total = totals.setdefault(name, {"key": name, "size_bytes": 0, "tensors": 0, "values": 0})
        if not isinstance(leaf, TensorDescription):
            total["values"] += 1
            continue
        total["tensors"] += 1
        if leaf.storage.key not in counted:
            counted.add(leaf.storage.key)
            total["size_bytes"] += leaf.storage.size_bytes
    return list(totals.values())


def jsonable(leaf: Any) -> Any:
    """A value of a checkpoint as JSON can say it; what it cannot, as text."""
    if leaf is None or isinstance(leaf, (bool, int, str)):
        return leaf
    if isinstance(leaf, float):
        # JSON has no word for these.
        return leaf if leaf == leaf and abs(leaf) != float("inf") else repr(leaf)
    if isinstance(leaf, (list, tuple, dict)):
        return {} if isinstance(leaf, dict) else []  # only empty ones are leaves
    return short(leaf)


def short(leaf: Any) -> str:
    """A value of a checkpoint on one line."""
    if isinstance(leaf, (Name, Placeholder)):
        return f"<{leaf.qualified}>"
    if isinstance(leaf, StorageDescription):
        return f"storage of {count(leaf.numel, leaf.dtype)}"
    text = repr(leaf)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({len(text)} characters)"
