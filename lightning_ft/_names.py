"""Every name that exists on disk, its parser, and the handling of paths; text only, no input or output.

Paths are `str`: an absolute local path or a URL. `pathlib` drops one slash of `s3://`, and the data then
lands in a local directory called `s3:`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

KEY = "lightning_ft"
"""The one key this package adds to Lightning's checkpoint dictionary."""

FORMAT_VERSION = 1
LOCK_NAME = ".lightning_ft.lock"
ORIGIN_NAME = ".lightning_ft.dirpath"
STARTS_NAME = ".lightning_ft.starts"
PROBE_PREFIX = ".lightning_ft.probe."
SAVE_NOW = "SAVE_NOW"
"""Made by the user, to ask for a save."""
SUFFIX = ".ckpt"

_EMERGENCY = re.compile(r"diverged-step=([0-9]{8,})(?:-v([1-9][0-9]*))?\.ckpt")
_CHECKPOINT = re.compile(r"step=([0-9]{8,})(?:-v([1-9][0-9]*))?\.ckpt")
_LEFTOVER = re.compile(r"\.(?P<name>[^/]+)\.(?P<token>[0-9a-f]{16})\.(?P<kind>attempt|deleted)")
_PROBE = re.compile(re.escape(PROBE_PREFIX) + r"(?P<token>[0-9a-f]{16})")
# At least two letters, so that the drive of a Windows path is no scheme; `::` chains file systems in fsspec.
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.\-]+(?:::[A-Za-z0-9+.\-]+)*)://(?P<rest>.*)", re.DOTALL)
# What `str(Path("s3://bucket/run"))` leaves of the URLs that people pass through pathlib. Only well-known
# schemes, because `name:/` may begin an honest relative path.
_COLLAPSED_URL = re.compile(r"(file|local|memory|s3a?|gs|gcs|abfss?|az|hdfs|oci|hf|r2):/(?!/)(.*)", re.DOTALL)

_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+://[^/@]*?:)[^/@]+@")


def checkpoint_name(step: int, version: int = 0) -> str:
    """`step=00001000.ckpt`, or `step=00001000-v1.ckpt` for a second checkpoint of the same step."""
    return f"step={step:08d}-v{version}{SUFFIX}" if version else f"step={step:08d}{SUFFIX}"


def parse_checkpoint_name(name: str) -> tuple[int, int] | None:
    """The (step, version) of a name that `checkpoint_name` makes, None for every other name."""
    match = _CHECKPOINT.fullmatch(name)
    if match is None:
        return None
    step, version = int(match[1]), int(match[2] or 0)
    # A ninth digit is only ours if the number needs it: two names for one step could not be told apart.
    return (step, version) if checkpoint_name(step, version) == name else None


def emergency_name(step: int, names: Iterable[str]) -> str:
    """`diverged-step=00001000.ckpt`, or with the lowest version that makes it none of `names`."""
    taken, version = set(names), 0
    while (name := f"diverged-{checkpoint_name(step, version)}") in taken:
        version += 1
    return name


def parse_emergency_name(name: str) -> tuple[int, int] | None:
    """The (step, version) of a name that `emergency_name` makes, None for every other name."""
    return parse_checkpoint_name(name.removeprefix("diverged-")) if _EMERGENCY.fullmatch(name) else None


IN_SIGHT = 2
"""A new name is one of so many that come last among all, by step or by version: see `next_name`."""


def next_name(step: int, names: Iterable[str]) -> str:
    """A name for a new checkpoint that is none of `names`, and from which its being the newest can be guessed.

    It is one of the last by step and version, as it is anyway unless training went back by several checkpoints; then
    it gets a version that makes it one of the last by version and step.
    """
    taken = {parsed for name in names if (parsed := parse_checkpoint_name(name))}

    def in_sight(version: int) -> bool:
        later_steps = sum(other > (step, version) for other in taken)
        later_versions = sum(other[::-1] > (version, step) for other in taken)
        return min(later_steps, later_versions) < IN_SIGHT

    version = 0
    while (step, version) in taken or not in_sight(version):
        version += 1
    return checkpoint_name(step, version)


def likely_newest(names: Iterable[str], count: int) -> list[str]:
    """The last `count` of our checkpoint names by step, and by version: the newest is one of them (`next_name`)."""
    parsed = {found: name for name in names if (found := parse_checkpoint_name(name))}
    by_step = sorted(parsed, reverse=True)[:count]
    by_version = sorted(parsed, key=lambda found: found[::-1], reverse=True)[:count]
    return [parsed[found] for found in dict.fromkeys(by_step + by_version)]


@dataclass(frozen=True)
class Leftover:
    """What the hidden name of an unfinished write, deletion or probe says."""

    name: str
    token: str
    kind: str


def attempt_name(name: str, token: str) -> str:
    """The hidden name under which the checkpoint `name` is written; `token` is 16 hexadecimal digits."""
    return f".{name}.{token}.attempt"


def deleted_name(name: str, token: str) -> str:
    """The hidden name under which the checkpoint `name` waits for its data to be deleted."""
    return f".{name}.{token}.deleted"


def probe_name(token: str) -> str:
    """The hidden name of the file with which a directory is tried out."""
    return PROBE_PREFIX + token


def parse_leftover(name: str) -> Leftover | None:
    """What `name` says if it is a hidden name of this package, None for every other name."""
    if match := _LEFTOVER.fullmatch(name):
        return Leftover(match["name"], match["token"], match["kind"])
    if match := _PROBE.fullmatch(name):
        return Leftover("", match["token"], "probe")
    return None


def is_local(path: str) -> bool:
    """Whether a normalised path lies in a mounted file system, as opposed to a URL."""
    return _URL.match(path) is None


def join(dirpath: str, name: str) -> str:
    """The path of `name` in `dirpath`."""
    if not dirpath or dirpath.endswith("/"):
        return dirpath + name
    return f"{dirpath}/{name}"


def split(path: str) -> tuple[str, str]:
    """The directory and the last name of `path`, so that `join(*split(path)) == path`."""
    match = _URL.match(path)
    root = f"{match['scheme']}://" if match else ("/" if path.startswith("/") else "")
    dirpath, _, name = path[len(root) :].rpartition("/")
    return root + dirpath, name


def without_password(url: str) -> str:
    """`url` as it may be shown to anybody."""
    return _PASSWORD.sub(r"\1***@", url)


def normalise(path: str | os.PathLike[str]) -> str:
    """The one spelling of a path: absolute if local (`~` expanded, `file://` gone), a URL as given.

    A trailing slash is dropped; a URL that went through `pathlib` gets its second slash back.
    """
    text = os.fspath(path)
    if collapsed := _COLLAPSED_URL.fullmatch(text):
        # `file:/tmp` keeps its absolute path: `file:///tmp`.
        slash = "/" if collapsed[1] in ("file", "local") else ""
        text = f"{collapsed[1]}://{slash}{collapsed[2]}"
    match = _URL.fullmatch(text)
    if match is None:
        return os.path.abspath(os.path.expanduser(text))
    scheme, rest = match["scheme"].lower(), match["rest"]
    if scheme in ("file", "local"):
        return os.path.abspath(os.path.expanduser(rest))
    return f"{scheme}://{rest.rstrip('/')}"
