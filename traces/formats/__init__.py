"""One reader a file format. A new format is one module here with NAME and `read(path, options)`, and one YAML in
conf/trace. Modules whose name begins with an underscore are what readers share."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import pkgutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.table import Trace, validate


def readers() -> dict[str, str]:
    """Format name -> module name, of all modules in this folder."""
    names = [info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")]
    return {name: f"{__name__}.{name}" for name in sorted(names)}


def read(path: Path | str, name: str, options: Mapping[str, Any] | None = None) -> Trace:
    """The trace in `path`, read as format `name` and checked.

    Options of all readers: `answers` (reused | absent), `origin` (public | yours), `source`, `licence`; a reader says
    which more it has. None is the default. Raises TraceError: no such file, unknown format, a broken row.
    """
    module = readers().get(name)
    if module is None:
        raise TraceError("trace", "trace.format", f"unknown format {name!r}", f"known are {', '.join(readers())}")
    if not Path(path).is_file():
        raise TraceError(str(path), "trace.path", "no such file", "give the path of a trace with trace.path=FILE")
    trace: Trace = importlib.import_module(module).read(Path(path), options or {})
    validate(trace)
    return trace


def text_of(path: Path) -> str:
    """The file's text, unpacked when it ends in .gz. Raises TraceError when it is not UTF-8 or not gzip."""
    is_packed = path.suffix == ".gz"
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if is_packed else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        kind = "gzip" if is_packed else "UTF-8"
        raise TraceError(str(path), "file", f"cannot be read as {kind} text: {error}", "check the file") from None


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
