"""`lightning-ft diff`: which keys and tensors two checkpoints differ in, and by how much."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from lightning_ft._inspection.contents import Contents
from lightning_ft._inspection.descriptions import TensorDescription
from lightning_ft.cli import options
from lightning_ft.cli.exits import Code, reported
from lightning_ft.cli.options import AsJson, StorageOptions
from lightning_ft.cli.output import Output, count, progress_bar
from lightning_ft.cli.show import jsonable, short
from lightning_ft.storage import Storage

if TYPE_CHECKING:
    from lightning_ft._inspection.difference import Comparison, Difference


def add_to(app: typer.Typer) -> None:
    """`app` has the command."""
    app.command("diff", short_help="What two checkpoints differ in, and by how much", epilog=EPILOG)(diff)


EPILOG = """\b
Compared is what the files hold, bit for bit, and not their manifests; what
names a save (generation, run, start, parent, reason) is left out. 0.0 and
-0.0 differ. Relative: the difference divided by the larger magnitude.

\b
Examples:
  lightning-ft diff runs/1/step=00001000.ckpt runs/2/step=00001000.ckpt
  lightning-ft diff a.ckpt b.ckpt --only state_dict
  lightning-ft diff a.ckpt b.ckpt --ignore 'callbacks' --ignore '*.rng'

\b
JSON:
  a, b: {path, step, epoch}, equal, compared, left_out: [name],
  differences: [name, kind: only_in_a, only_in_b, value, shape, dtype or
  elements; a, b, differing, numel, max_abs, max_rel, not_finite]

\b
Exit code: 0 if they are equal, 1 if they differ or one is damaged, 3 if
there is no such file, 6 without torch. All: lightning-ft --help
"""


@reported("diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A checkpoint file, path or URL.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    only: Annotated[str | None, typer.Option(metavar="KEY", help="Only what is under this key.")] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Not what this shell pattern matches, nor what is under it; repeatable."),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: AsJson = False,
) -> Code:
    """Compare two checkpoints: keys, values, and every element of every tensor.

    Reads one tensor of each at a time, and executes nothing of either file.
    """
    chosen = options.storage_options(storage_option)
    storage = Storage(chosen)
    paths = []
    for argument, url in (("A", a), ("B", b)):
        path = options.location(url, chosen, argument)
        options.existing(storage, path, argument, "file")
        if not storage.is_file(path):
            what = f"{path} is a directory, and a file is needed: lightning-ft consolidate makes one of shards"
            raise typer.BadParameter(what, param_hint=argument)
        paths.append(path)
    from lightning_ft._inspection.difference import compare, selector

    with progress_bar("comparing", as_json) as progress:
        comparison = compare(
            storage, paths[0], paths[1], selector(only, ignore or []),
            progress,
        )  # fmt: skip
    if not comparison.compared:
        raise typer.BadParameter("no key of either file is left to compare", param_hint="--only, --ignore")
    _answer(Output(as_json), comparison)
    return Code.BAD if comparison.differences else Code.FINE


def _answer(output: Output, comparison: Comparison) -> None:
    differences = comparison.differences
    output.document(
        "diff",
        a=_side(comparison.a),
        b=_side(comparison.b),
        equal=not differences,
        compared=comparison.compared,
        left_out=list(comparison.left_out),
        differences=[_entry(difference) for difference in differences],
    )
    for letter, side in (("A", comparison.a), ("B", comparison.b)):
        step = "-" if side.step is None else str(side.step)
        output.line(f"{letter}  {side.path}  step {step}, epoch {'-' if side.epoch is None else side.epoch}", "bold")
    output.line()
    tensors = [d for d in differences if d.kind == "elements"]
    others = [d for d in differences if d.kind != "elements"]
    if tensors:
        heads = ("tensor", "differing", "of", "max abs", "max rel", "")
        output.table(heads, [_cells(d) for d in tensors], frozenset(heads[1:5]))
        output.line()
    if others:
        output.table(("key", "A", "B"), [[d.name, *_sides(d)] for d in others])
        output.line()
    if differences:
        output.line(f"{len(differences)} of {count(comparison.compared, 'key')} differ.", "bold red")
    else:
        output.line(f"Equal: {count(comparison.compared, 'key')}, bit for bit.", "bold green")


def _cells(difference: Difference) -> list[str]:
    remark = f"{difference.not_finite} not finite" if difference.not_finite else ""
    if not remark and difference.max_abs == 0:
        remark = "signs of zero, or bits of equal numbers"
    return [
        difference.name,
        str(difference.differing),
        str(difference.numel),
        "-" if difference.max_abs is None else f"{difference.max_abs:.3g}",
        "-" if difference.max_rel is None else f"{difference.max_rel:.3g}",
        remark,
    ]


def _sides(difference: Difference) -> tuple[str, str]:
    a = "(not there)" if difference.kind == "only_in_b" else _said(difference.a)
    b = "(not there)" if difference.kind == "only_in_a" else _said(difference.b)
    return a, b


def _said(leaf: Any) -> str:
    if isinstance(leaf, TensorDescription):
        return f"{leaf.dtype} [{' x '.join(map(str, leaf.shape))}]"
    return short(leaf)


def _side(contents: Contents) -> dict[str, Any]:
    return {"path": contents.path, "step": contents.step, "epoch": contents.epoch}


def _entry(difference: Difference) -> dict[str, Any]:
    sides = {}
    for letter, leaf in (("a", difference.a), ("b", difference.b)):
        sides[letter] = _said(leaf) if isinstance(leaf, TensorDescription) else jsonable(leaf)
    if difference.kind == "elements":
        sides = {"a": None, "b": None}
    return {
        "name": difference.name,
        "kind": difference.kind,
        **sides,
        "differing": difference.differing,
        "numel": difference.numel,
        "max_abs": difference.max_abs,
        "max_rel": difference.max_rel,
        "not_finite": difference.not_finite,
    }
