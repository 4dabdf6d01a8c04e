"""One reader a file format. A new format is one module here with NAME and `read(path, options)`, and one YAML in conf/trace."""

from __future__ import annotations

import gzip
import hashlib
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from traces.errors import TraceError
from traces.table import Trace


def readers() -> dict[str, str]:
    """Format name -> module name, of all modules in this folder."""
    return {info.name: f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")}


def read(path: Path | str, name: str, options: Mapping[str, Any] | None = None) -> Trace:
    """The trace in `path`, read as format `name`. Raises TraceError: no such file, unknown format, a broken row."""
    module = readers().get(name)
    if module is None:
        raise TraceError("trace", "trace.format", f"unknown format {name!r}", f"known are {', '.join(sorted(readers()))}")
    if not Path(path).is_file():
        raise TraceError(str(path), "trace.path", "no such file", "give the path of a trace with trace.path=FILE")
    trace: Trace = importlib.import_module(module).read(Path(path), options or {})
    return trace


def text_of(path: Path) -> str:
    """The file's text, unpacked when it ends in .gz. Raises TraceError when it is not UTF-8 or not gzip."""
    raw = path.read_bytes()
    try:
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError, ValueError) as error:
        raise TraceError(str(path), "file", f"cannot be read as {'gzip' if path.suffix == '.gz' else 'UTF-8'} text: {error}") from None


def sha256_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
