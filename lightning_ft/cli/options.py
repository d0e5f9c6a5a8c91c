"""Arguments that several commands have, and what is wrong with them said before anything is done."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated, Any

import fsspec
import typer

from lightning_ft._names import is_local, normalise
from lightning_ft.cli.exits import Code, Failure
from lightning_ft.errors import ConfigurationError
from lightning_ft.storage import Storage

AsJson = Annotated[
    bool, typer.Option("--json", help="One JSON document on stdout and nothing else; its keys are stable.")
]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--storage-option",
        metavar="KEY=VALUE",
        help="For the fsspec file system of a URL; may be repeated. A value that is JSON is taken as that, dots reach"
        " into it: client_kwargs.endpoint_url=http://host:9000. Without it, fsspec's own configuration and the"
        " environment count; keep secrets there, where other users cannot see them.",
    ),
]


class Depth(str, Enum):
    """How carefully files are looked at."""

    SIZE = "size"
    FULL = "full"


def storage_options(pairs: list[str] | None) -> dict[str, Any]:
    """The options as `fsspec` takes them.

    Raises:
        typer.BadParameter: One has no `=`, no key, or goes into what is no object.
    """
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--storage-option")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        *outer, last = key.split(".")
        place = options
        for name in outer:
            place = place.setdefault(name, {})
            if not isinstance(place, dict):
                raise typer.BadParameter(
                    f"{key!r} goes into {name!r}, which has a value already", param_hint="--storage-option"
                )
        place[last] = value
    return options


def location(path: str, options: dict[str, Any], argument: str) -> str:
    """`path`, normalised; its file system could be made.

    Raises:
        typer.BadParameter: There is no such file system, it does not take the options, or a local path has some.
        Failure: A package for it is not installed.
    """
    if not path.strip():
        raise typer.BadParameter("is empty", param_hint=argument)
    path = normalise(path)
    if is_local(path):
        if "\0" in path:
            raise typer.BadParameter(f"{path!r} is no path", param_hint=argument)
        return path
    try:
        fsspec.core.url_to_fs(path, **Storage(options).storage_options)  # without those that are ours
    except ImportError as error:
        raise Failure(f"{argument} {path}: {error}", Code.NOT_INSTALLED) from error
    except Exception as error:  # every file system has its own way to refuse options
        hint = "--storage-option" if options else argument
        raise typer.BadParameter(f"{path}: {type(error).__name__}: {error}", param_hint=hint) from error
    return path


def directory(storage: Storage, path: str, argument: str) -> None:
    """There is something at `path`, and it is no file: a store would list one as an empty directory.

    Raises:
        Failure: There is nothing, or no answer.
        typer.BadParameter: It is a file, or see `existing`.
    """
    existing(storage, path, argument, "directory")
    if storage.is_file(path):
        raise typer.BadParameter(f"{path} is a file: lightning-ft verify and show take one", param_hint=argument)


def existing(storage: Storage, path: str, argument: str, what: str = "file or directory") -> None:
    """There is something at `path`; the storage was asked, and answered.

    Raises:
        Failure: There is nothing, or no answer.
        typer.BadParameter: The file system does not take the options, which some say at their first use only.
        ConfigurationError: They lack something, or it is none of the supported ones.
    """
    try:
        if storage.exists(path):
            return
    except TypeError as error:
        if not storage.storage_options:
            raise
        raise typer.BadParameter(f"{path}: {error}", param_hint="--storage-option") from error
    except ConfigurationError:
        raise
    except Exception as error:  # stores have errors of their own classes
        raise Failure(f"{argument} {path}: {type(error).__name__}: {error}", Code.STORAGE) from error
    raise Failure(f"{argument}: there is no {what} {path}", Code.NOTHING)
