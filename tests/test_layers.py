"""The direction of imports, and that the lower half works where torch and lightning do not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_ft"

LAYERS: dict[int, dict[str, str]] = {
    0: {
        "": "errors events exit_codes _names _words _watcher",
        "_hang": "headway",
        "_preemption": "signals slurm grace save_now",
        "_sharded": "registry wrappers",
    },
    1: {
        "": "manifest storage",
        "_disk": "archive direct sink disk_file attempt directory threaded_file lock local_store holder",
        "_inspection": "descriptions contents",
        "_stores": "directory errors calls objects s3 s3_parts s3_upload ranged_file verified_file",
    },
    2: {
        "": "discovery retention triggers rotation",
        "_data": "elastic",
        "_fit": "local_tier newest_durable",
        "_history": "event_file timeline interval pace process_age",
        "_inspection": "damage check survey pruning",
        "_proof": "traces kill_point assignment",
        "_restart": "elsewhere fallback fetched shared_verification starts resumption",
        "_saving": "read_back",
    },
    3: {
        "": "dataloading state guards",
        "_copying": "staging lanes places copy_plan alike template layout buffers copies skeleton optimizer_steps "
        "module_tree",
        "_data": "order deal kinds tracked",
        "_divergence": "criteria late_losses",
        "_fit": "lineage",
        "_hang": "arrivals",
        "_inspection": "tensors difference",
        "_preemption": "loader_workers",
        "_ranks": "same_directory dist peers out_of_memory",
        "_restart": "broadcast",
        "_saving": "engine task options times uploads failure writers serialise weights_only",
        "_sharded": "plan writer sharding shards places filling assembling positions own_state replicated",
        "_state": "random_state digest",
        "_vote": "ballot ballot_box roll_call",
    },
    4: {
        "": "callback plugin strategies preset",
        "_data": "loaders",
        "_divergence": "left_out emergency last_finite rollback watch",
        "_fit": "lightning_callbacks session saves watch guarding directories surprises loops logger_news console "
        "requirements settings due ending boundaries durability_watch",
        "_hang": "watch",
        "_history": "chronicle measuring",
        "_inspection": "consolidate",
        "_preemption": "watch own_signals leaving",
        "_proof": "recorder drilled redirect own_attributes",
        "_ranks": "exceptions launched before_session",
        "_restart": "choose restore compare loading consistent",
        "_sharded": "written_by loading parallel_writes",
        "_state": "metrics merged_metrics takeover",
        "_vote": "before_validation validation voting",
    },
    5: {
        "": "testing cli drill report _fixture",
    },
}
LAYER_OF = {
    f"{package}.{name}".lstrip("."): layer
    for layer, packages in LAYERS.items()
    for package, names in packages.items()
    for name in names.split()
}
# Of these, each module has a layer of its own; other packages (`cli`, `drill`) are one room.
SPLIT = {package for packages in LAYERS.values() for package in packages if package}
# Belong to no layer: the lazy façade, its version, and the entry point of `python -m`.
APART = {"__init__", "__about__", "__main__"}
FREE_OF = {0: {"torch", "lightning"}, 1: {"torch", "lightning"}, 2: {"torch", "lightning"}, 3: {"lightning"}}
ALIASES = {"pytorch_lightning": "lightning", "lightning_fabric": "lightning", "torchmetrics": "torch"}


def violations(module: str, source: str) -> list[str]:
    """What `source` imports and must not, if it is the module `module` of the package."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            targets = [f"relative import of {node.module or '.'}"]
        elif isinstance(node, ast.ImportFrom) and node.module in {
            "lightning_ft",
            *(f"lightning_ft.{p}" for p in SPLIT),
        }:
            # `from lightning_ft import events` names a module; any other name would come from the façade.
            targets = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [str(node.module)]
        else:
            continue
        found += [f"{module}:{node.lineno}: {why}" for target in targets if (why := refused(module, target))]
    return found


def refused(module: str, target: str) -> str | None:
    """Why `module` must not import `target`, None if it may."""
    layer = LAYER_OF.get(module)
    if layer is None:
        return "has no layer: decide which one, and add it to the table"
    top, _, rest = target.partition(".")
    if target.startswith("relative"):
        return target
    if top != "lightning_ft":
        name = ALIASES.get(top, top)
        return f"layer {layer} imports {top}" if name in FREE_OF.get(layer, set()) else None
    name = room_of(rest)
    if name == "__about__":
        return None
    if name not in LAYER_OF:
        return f"imports {target or 'the root'}, which is no module of a layer"
    if LAYER_OF[name] > layer:
        return f"layer {layer} imports {name} of layer {LAYER_OF[name]}"
    return None


def room_of(dotted: str) -> str:
    """What has a layer, of a dotted name below the package: a module, or a package that is not split."""
    first, _, rest = dotted.partition(".")
    return f"{first}.{rest.partition('.')[0]}" if first in SPLIT and rest else first


def module_of(path: Path) -> str:
    return room_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def is_bare(path: Path) -> bool:
    """Whether it is the `__init__` of a package whose modules have layers of their own."""
    return path.name == "__init__.py" and path.parent.name in SPLIT


FILES = sorted(path for path in PACKAGE.rglob("*.py") if module_of(path) not in APART and not is_bare(path))


def test_every_module_has_a_layer() -> None:
    assert {module_of(path) for path in FILES} - set(LAYER_OF) == set()


def test_every_module_is_on_the_map() -> None:
    page = (ROOT / "docs" / "development.md").read_text()
    rooms = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert {room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page} == set()


def test_packages_of_several_layers_import_nothing_themselves() -> None:
    bare = [path for path in PACKAGE.rglob("*.py") if is_bare(path)]
    assert {path.parent.name for path in bare} == SPLIT
    assert [path for path in bare if len(ast.parse(path.read_text()).body) != 1] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    assert violations(module_of(path), path.read_text()) == []


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("storage", "from lightning_ft.manifest import seal", True),
        ("storage", "from lightning_ft import events, errors", True),
        ("storage", "import os, fsspec", True),
        ("storage", "from lightning_ft.discovery import select", False),
        ("storage", "from lightning_ft import discovery", False),
        ("storage", "import lightning_ft.discovery", False),
        ("storage", "def f():\n    from lightning_ft.plugin import X", False),
        ("storage", "if TYPE_CHECKING:\n    import torch.nn as nn", False),
        ("storage", "from torchmetrics import Metric", False),
        ("storage", "from . import manifest", False),
        ("_saving.engine", "import torch", True),
        ("_saving.engine", "from lightning.pytorch import Trainer", False),
        ("_saving.engine", "import pytorch_lightning as pl", False),
        ("plugin", "from lightning.fabric.plugins import CheckpointIO", True),
        ("plugin", "from lightning_ft import FaultTolerantCheckpoint", False),
        ("plugin", "import lightning_ft", False),
        ("plugin", "from lightning_ft.__about__ import __version__", True),
        ("plugin", "from lightning_ft.unheard_of import x", False),
        ("unheard_of", "import os", False),
        ("storage", "from lightning_ft._disk import archive", True),
        ("storage", "from lightning_ft._disk.archive import Archive", True),
        ("storage", "from lightning_ft._saving import engine", False),
        ("storage", "from lightning_ft._disk import unheard_of", False),
        ("cli", "from lightning_ft.callback import FaultTolerantCheckpoint", True),
    ],
)
def test_the_check_can_fail(module: str, source: str, allowed: bool) -> None:
    assert (violations(module, source) == []) is allowed


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "lightning", "pytorch_lightning"}:
            raise ImportError(name + " is blocked")

sys.meta_path.insert(0, Blocked())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def _import_blocked(*modules: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, *modules], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_the_lower_half_needs_neither_torch_nor_lightning() -> None:
    modules = [f"lightning_ft.{name}" for name, layer in LAYER_OF.items() if layer <= 2]
    run = _import_blocked(*modules)
    assert run.returncode == 0, run.stderr


def test_the_block_can_fail() -> None:
    run = _import_blocked("torch")
    assert run.returncode != 0
    assert "torch is blocked" in run.stderr
