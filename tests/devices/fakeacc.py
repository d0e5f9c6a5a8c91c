"""The device of ``fakeacc.cpp``, and tests that run on it.

A test that is marked with `on_fakeacc` runs in another process, where torch has the device ``fakeacc:0`` and
`torch.accelerator` finds it. One such process serves all tests of a pytest process, one after the other. The device
is built once per machine and version of torch, by g++ alone.
"""

from __future__ import annotations

import atexit
import fcntl
import functools
import hashlib
import importlib
import multiprocessing
import os
import subprocess
import sys
import sysconfig
import threading
import traceback
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch

SOURCE = Path(__file__).with_name("fakeacc.cpp")
BUILT = Path(__file__).parents[2] / "build" / "fakeacc"
TEST_SECS = 200.0
"""No test here takes so long: one that does hangs, and its process is killed."""

needs_compiler = pytest.mark.needs("g++", "Python.h")


# -- building and loading ----------------------------------------------------------------------------------------


def build() -> Path:
    """The compiled device, made from the source as it is now if it was not before.

    Raises:
        RuntimeError: It does not compile.
    """
    root = Path(torch.__file__).parent
    flags = [
        "-std=c++20", "-O1", "-fPIC", "-shared", "-w", "-DTORCH_EXTENSION_NAME=fakeacc",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}", f"-I{root}/include",
        f"-I{root}/include/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}", str(SOURCE),
        f"-L{root}/lib", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", f"-Wl,-rpath,{root}/lib",
    ]  # fmt: skip
    versions = f"{sys.version} {torch.__version__} {flags}"
    name = hashlib.sha256(SOURCE.read_bytes() + versions.encode()).hexdigest()[:16]
    library = BUILT / f"fakeacc-{name}.so"
    BUILT.mkdir(parents=True, exist_ok=True)
    # The other workers of pytest wait here; a lock of the kernel goes with the process that holds it.
    with open(BUILT / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            partial = library.with_suffix(".partial")
            made = subprocess.run(["g++", *flags, "-o", str(partial)], capture_output=True, text=True, check=False)
            if made.returncode:
                raise RuntimeError(f"{SOURCE} does not compile: {made.stderr[-3000:]}")
            os.replace(partial, library)
    return library


class _Module:
    """What torch looks for under ``torch.fakeacc``."""

    class device:  # torch's name
        def __init__(self, index: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *exception: Any) -> None: ...

    is_available = is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = manual_seed_all = staticmethod(lambda value: None)
    _lazy_init = staticmethod(lambda: None)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    synchronize = staticmethod(lambda device=None: torch.accelerator.synchronize())
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: None)


def load(library: Path) -> Any:
    """The device ``fakeacc:0`` is there, for the rest of this process; returns its controls."""
    torch.utils.rename_privateuse1_backend("fakeacc")
    spec = spec_from_file_location("fakeacc", library, loader=ExtensionFileLoader("fakeacc", str(library)))
    assert spec is not None
    assert spec.loader is not None
    controls = module_from_spec(spec)
    spec.loader.exec_module(controls)
    torch._register_device_module("fakeacc", _Module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return controls


# -- tests in a process of their own -----------------------------------------------------------------------------

controls: Any = None
"""Set in the process that has the device: `set_lazy`, `set_delay_ms` and `counts` of ``fakeacc.cpp``."""


def on_fakeacc(test: Callable[..., None]) -> Callable[..., None]:
    """`test` runs where the device is; its arguments have to be picklable (parameters and ``tmp_path`` are)."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        _Process.current().run(test.__module__, test.__qualname__, args, kwargs)

    return needs_compiler(run)


class _Process:
    """The process that has the device; made when first asked for, and again after one that hung or died."""

    _current: _Process | None = None

    def __init__(self) -> None:
        library = build()
        context = multiprocessing.get_context("forkserver")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, library), daemon=True)
        self._process.start()
        other.close()

    @classmethod
    def current(cls) -> _Process:
        if cls._current is None:
            cls._current = cls()
            atexit.register(cls._current.end)
        return cls._current

    def run(self, module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._connection.send((module, name, args, kwargs))
        try:
            if not self._connection.poll(TEST_SECS):
                self.end()
                pytest.fail(f"{name} took more than {TEST_SECS:.0f} s on the device, and was killed", pytrace=False)
            failure = self._connection.recv()
        except EOFError:
            self.end()
            pytest.fail(f"{name}: the process died, exit code {self._process.exitcode}", pytrace=False)
        if failure is not None:
            pytest.fail(failure, pytrace=False)

    def end(self) -> None:
        type(self)._current = None
        self._process.kill()
        self._process.join()


def _serve(connection: Any, library: Path) -> None:
    global controls
    torch.set_num_threads(1)
    controls = load(library)
    while True:
        try:
            module, name, args, kwargs = connection.recv()
        except EOFError:
            return
        connection.send(_outcome(module, name, args, kwargs))


def _outcome(module: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    test = getattr(importlib.import_module(module), name).__wrapped__
    before = threading.enumerate()
    try:
        test(*args, **kwargs)
    except BaseException:
        failure: str | None = traceback.format_exc()
    else:
        ours = [thread for thread in threading.enumerate() if thread.name.startswith("lightning-ft")]
        left = [thread.name for thread in ours if thread not in before]
        failure = f"threads left running: {left}" if left else None
    controls.set_delay_ms(0)
    controls.set_lazy(False)
    torch.accelerator.synchronize()
    return failure
