"""Opens the rows of a configured source. A format's library is imported when its first file is opened."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from asyncrl.checks.sources import Place, Source, places
from asyncrl.data.rows.base import Rows, joined
from asyncrl.data.rows.custom import CustomRows
from asyncrl.data.rows.jsonl import JsonlFile
from asyncrl.data.rows.view import PromptRows
from asyncrl.errors import DataError

NEEDS = {"arrow": ("pyarrow", "pyarrow"), "hub": ("datasets", "'asyncrl[data]'")}
"""By module of this package: the library that it imports, and what to install for it."""


def open_source(source: Source) -> PromptRows:
    """Open the rows of a source, with checked prompts.

    Raises:
        DataError: a file is missing or cannot be read, a dataset cannot be loaded, or the first row has no usable
            prompt.
        ConfigError: a user's class cannot be loaded or constructed.
    """
    return PromptRows(source, open_rows(source))


def open_rows(source: Source) -> Rows:
    """Open all rows of a source without checking the first. Raises DataError and ConfigError as `open_source`."""
    return joined([_open(place, source) for place in places(source)])


def _open(place: Place, source: Source) -> Rows:
    if place.kind == "jsonl":
        return JsonlFile(place.path)
    if place.kind == "custom":
        return CustomRows(place.path, source.args, source.key)
    if place.kind == "parquet":
        return late_import("arrow", source).ParquetFile(place.path)
    if place.kind == "saved":
        return late_import("arrow", source).saved_dataset(place.path)
    return late_import("hub", source).load(place.path)


def late_import(module: str, source: Source) -> ModuleType:
    """Import `asyncrl.data.rows.<module>` when needed: pyarrow takes 0.2 s and 60 MB, `datasets` seconds."""
    library, installs = NEEDS[module]
    if importlib.util.find_spec(library) is None:
        raise DataError(f"{source.key}={source.title} needs {library}, which is not installed: pip install {installs}")
    return importlib.import_module(f"asyncrl.data.rows.{module}")
