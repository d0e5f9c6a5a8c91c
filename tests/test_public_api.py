"""The promised names, their parameters, and that importing the package alone stays cheap."""

import inspect
import subprocess
import sys

import pytest

import lightning_ft as ft

ERRORS = {
    "CheckpointError",
    "ConfigurationError",
    "CorruptCheckpointError",
    "DirectoryInUseError",
    "DivergenceError",
    "FaultToleranceError",
    "ManifestError",
    "NoUsableCheckpointError",
    "PeerLostError",
    "RankFailure",
    "RestoreError",
    "SaveError",
    "StorageError",
    "TopologyError",
    "UnsupportedFormatError",
}
DOCUMENTED = ERRORS | {
    "CheckpointInfo",
    "DivergenceGuard",
    "FSDPStrategy",
    "FaultTolerantCheckpoint",
    "FaultTolerantCheckpointIO",
    "HangGuard",
    "Manifest",
    "ModelParallelStrategy",
    "PreemptionGuard",
    "__version__",
    "events",
    "fault_tolerance",
    "last_good",
    "list_checkpoints",
    "testing",
    "verify",
}


def loaded_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that ran `code`."""
    script = f"{code}\nimport sys\nprint(*sorted({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def parameters(cls: type) -> list[inspect.Parameter]:
    return list(inspect.signature(cls).parameters.values())


def test_all_is_the_documented_list() -> None:
    assert set(ft.__all__) == DOCUMENTED
    assert len(ft.__all__) == len(DOCUMENTED)


def test_dir_lists_every_public_name() -> None:
    assert set(dir(ft)) >= DOCUMENTED


@pytest.mark.parametrize("name", sorted(DOCUMENTED))
def test_name_resolves(name: str) -> None:
    assert getattr(ft, name) is not None


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'FaultTolerantChekpoint'"):
        _ = ft.FaultTolerantChekpoint


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_errors_are_one_tree(name: str) -> None:
    error = getattr(ft, name)
    assert issubclass(error, ft.FaultToleranceError)
    assert issubclass(error, Exception)


def test_import_alone_loads_neither_torch_nor_lightning() -> None:
    loaded = loaded_after("import lightning_ft")
    assert "lightning_ft" in loaded
    assert loaded.isdisjoint({"torch", "lightning", "pytorch_lightning", "numpy", "fsspec"})


def test_finding_checkpoints_needs_neither_torch_nor_lightning() -> None:
    loaded = loaded_after(
        "import lightning_ft as ft; ft.list_checkpoints, ft.last_good, ft.verify, ft.Manifest, ft.SaveError"
    )
    assert loaded.isdisjoint({"torch", "lightning", "pytorch_lightning"})


def test_the_two_tests_above_can_fail() -> None:
    assert {"torch", "lightning"} <= loaded_after("import lightning_ft as ft; ft.FaultTolerantCheckpoint")


# A parameter added, renamed or made positional is a decision, and this is where it shows.
def test_parameters_of_the_callback() -> None:
    found = parameters(ft.FaultTolerantCheckpoint)
    assert [p.name for p in found] == [
        "dirpath",
        "every_n_train_steps",
        "every_n_epochs",
        "train_time_interval",
        "keep_last",
        "keep_every_n_train_steps",
        "local_dirpath",
        "local_every_n_train_steps",
        "local_keep_last",
        "save_on_train_end",
        "guards",
        "max_restarts_without_progress",
        "warn_if_not_durable_after",
        "seed_workers",
        "strict",
    ]
    assert found[0].default is None
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found[1:])


def test_parameters_of_the_plugin() -> None:
    found = parameters(ft.FaultTolerantCheckpointIO)
    assert [p.name for p in found] == [
        "async_save",
        "staging",
        "when_busy",
        "verify",
        "verify_after_write",
        "layout",
        "load",
        "on_error",
        "retries",
        "storage_options",
    ]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in found)


def test_parameters_of_the_preemption_guard() -> None:
    assert [p.name for p in parameters(ft.PreemptionGuard)] == ["signals", "save_signal", "grace", "requeue"]


def test_every_parameter_is_annotated() -> None:
    # LightningCLI builds its YAML schema from the annotations.
    for cls in (ft.FaultTolerantCheckpoint, ft.FaultTolerantCheckpointIO, ft.PreemptionGuard):
        bare = [p.name for p in parameters(cls) if p.annotation is inspect.Parameter.empty]
        assert not bare, f"{cls.__name__}: {bare}"
