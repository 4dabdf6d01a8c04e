"""The registry of readers: what is not there, what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from traces import formats
from traces.errors import TraceError
from traces.formats import read, readers


def test_every_module_of_the_folder_is_a_reader_by_its_name() -> None:
    assert {"mooncake", "weka"} <= set(readers())
    assert all(not name.startswith("_") for name in readers())


def test_a_new_format_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.py").write_text(
        "from traces.table import Trace, TraceMeta, TraceRow\n"
        "NAME = 'lines'\n"
        "def read(path, options):\n"
        "    rows = [TraceRow(f'{n}', f'{n}', f'{n}', 0, 'main', None, 0, int(text), 1, arrival_s=float(n))\n"
        "            for n, text in enumerate(path.read_text().split())]\n"
        "    return Trace(tuple(rows), {}, TraceMeta(NAME, 'yours', path.name, 'none'))\n"
    )
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path)])
    (tmp_path / "data.txt").write_text("5 7")
    assert [row.input_tokens for row in read(tmp_path / "data.txt", "lines").rows] == [5, 7]
    (tmp_path / "data.txt").write_text("5 0")
    with pytest.raises(TraceError, match="input_tokens"):
        read(tmp_path / "data.txt", "lines")


def test_an_unknown_format_or_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"unknown format 'csv'; known are mooncake, weka"):
        read(tmp_path, "csv")
    with pytest.raises(TraceError, match=r"gone\.jsonl: trace\.path: no such file"):
        read(tmp_path / "gone.jsonl", "mooncake")


@pytest.mark.parametrize(
    ("name", "content"), [("a.jsonl.gz", b"plain"), ("b.jsonl", b"\xff\xfe\x00"), ("c.jsonl", b"")]
)
def test_a_file_that_is_no_text_or_empty_is_refused(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=name):
        read(tmp_path / name, "mooncake")


def test_origin_source_and_licence_are_the_options(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}')
    meta = read(path, "mooncake", {"origin": "yours", "source": "my log", "licence": "none"}).meta
    assert (meta.origin, meta.source, meta.licence) == ("yours", "my log", "none")
    assert meta.sha256 is not None and len(meta.sha256) == 64
    with pytest.raises(TraceError, match="origin"):
        read(path, "mooncake", {"origin": "found"})
