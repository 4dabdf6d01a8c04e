"""Two runs side by side: equal is same, slower is worse, another trace is not comparable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.__main__ import main as harness_main
from harness.compare import config_differences, differences, main
from harness.store import SCHEMAS, read_run


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    assert harness_main(["engine=cross_pd", "clock=virtual", f"results_dir={folder}"]) == 0
    return next(folder.glob("*/manifest.json")).parent


def slower(base: Path, folder: Path, factor: float) -> Path:
    """A copy of `base` whose first tokens came later by `factor`."""
    copy = folder / "slower"
    shutil.copytree(base, copy)
    path = copy / "requests.parquet"
    frame = pd.read_parquet(path)
    frame["first_token_ns"] = frame["sent_ns"] + (frame["first_token_ns"] - frame["sent_ns"]) * factor
    pq.write_table(pa.Table.from_pandas(frame, schema=SCHEMAS["requests"], preserve_index=False, safe=False), path)
    return copy


def test_a_run_against_itself_is_the_same(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(base), str(base), "--fail-on", "worse:ttft_p90:1%"]) == 0
    verdicts = {item.metric: item.verdict for item in differences(read_run(base), read_run(base))}
    assert set(verdicts.values()) == {"same"}
    assert "cross_pd" in capsys.readouterr().out


def test_five_percent_more_ttft_is_worse_and_trips_the_rule(base: Path, tmp_path: Path) -> None:
    other = slower(base, tmp_path, 1.05)
    found = {item.metric: item for item in differences(read_run(base), read_run(other))}
    assert found["ttft_p90"].verdict == "worse"
    assert found["ttft_mean"].change == pytest.approx(0.05, abs=1e-6)
    assert main([str(base), str(other), "--fail-on", "worse:ttft_p90:4%"]) == 1
    assert main([str(base), str(other), "--fail-on", "worse:ttft_p90:6%"]) == 0


def test_another_trace_is_not_comparable(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert harness_main(["engine=cross_pd", "clock=virtual", "seed=5", f"results_dir={tmp_path}"]) == 0
    other = next(tmp_path.glob("*/manifest.json")).parent
    assert main([str(base), str(other)]) == 2
    assert "not comparable" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["one"], ["none/here", "none/there"], ["{base}", "{base}", "--fail-on", "ttft>3"]])
def test_bad_words_get_one_clear_line(words: list[str], base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.format(base=base) for word in words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def test_configuration_differences_are_named_by_dotted_key() -> None:
    assert config_differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == [
        ("a.c", 2, 3),
        ("d", None, 4),
    ]
