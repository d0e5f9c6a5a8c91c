"""The direction of imports, and that the lower half works where torch and lightning do not."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "lightning_ft"

LAYERS: dict[int, str] = {
    0: "errors events exit_codes _names _words _registry _wrappers _headway _watcher _signals _slurm _grace _save_now",
    1: "manifest _archive _direct _sink _disk_file _attempt _directory _store_directory _threaded_file storage "
    "_lock _store_errors _calls _objects _local_store _s3 _s3_parts _s3_upload _ranged_file _verified_file "
    "_holder _descriptions _contents",
    2: "discovery retention triggers rotation _read_back _two_tiers _damage _check _fallback _survey _pruning "
    "_elastic _fetched _shared_verification _history _timeline _interval _starts _traces _kill_point "
    "_assignment _durable _pace _resumption _process_age",
    3: "_engine _save_task _save_options _save_times _sharded_plan _sharded_writer _sharding _uploads _failure "
    "_writers _same_directory _serialise _staging _lanes _plans _plan _alike _template _layout _buffers _copies "
    "_skeleton _weights_only _optimizer_steps _module_tree _rng _digest _dist _ballot _broadcast _tensors "
    "_difference _order _deal _kinds _tracked dataloading state guards _shards _places _filling _assembling "
    "_positions _own_state _replicated _ballot_box _roll_call _loader_workers _divergence _late_losses _line "
    "_peers _memory _arrivals",
    4: "callback _callbacks plugin _session _saves _watch _guarding _chronicle _tiers _surprises _choose _restore "
    "_loops _news _metrics _loaders _compare _written_by _recorder _consolidate _loading _merge _takeover "
    "_consistent _sharded_loading strategies _parallel_writes _before _validation _voting _hang _preemption "
    "_own_signals _leaving _left_out _emergency _last_finite _rollback _divergence_watch _exceptions _launched _early "
    "_console _requirements _drilled _settings _due _ending _boundaries _redirect _durability _measuring preset _own_attributes",
    5: "testing cli drill report _fixture",
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names.split()}
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
        elif isinstance(node, ast.ImportFrom) and node.module == "lightning_ft":
            # `from lightning_ft import events` names a module; any other name would come from the façade.
            targets = [f"lightning_ft.{alias.name}" for alias in node.names]
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
    name = rest.partition(".")[0]
    if name == "__about__":
        return None
    if name not in LAYER_OF:
        return f"imports {target or 'the root'}, which is no module of a layer"
    if LAYER_OF[name] > layer:
        return f"layer {layer} imports {name} of layer {LAYER_OF[name]}"
    return None


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


FILES = sorted(path for path in PACKAGE.rglob("*.py") if module_of(path) not in APART)


def test_every_module_has_a_layer() -> None:
    assert {module_of(path) for path in FILES} - set(LAYER_OF) == set()


def test_every_module_is_on_the_map() -> None:
    page = (ROOT / "docs" / "development.md").read_text()
    rooms = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert {room for room in rooms if f"`{room}`" not in page and f"`{room}/`" not in page} == set()


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
        ("_engine", "import torch", True),
        ("_engine", "from lightning.pytorch import Trainer", False),
        ("_engine", "import pytorch_lightning as pl", False),
        ("plugin", "from lightning.fabric.plugins import CheckpointIO", True),
        ("plugin", "from lightning_ft import FaultTolerantCheckpoint", False),
        ("plugin", "import lightning_ft", False),
        ("plugin", "from lightning_ft.__about__ import __version__", True),
        ("plugin", "from lightning_ft.unheard_of import x", False),
        ("unheard_of", "import os", False),
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
