"""Whole runs: exact repeats, planned hits against reported ones, keys that never reach a file, a kill half way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.nightly import content_digest
from harness.__main__ import main
from harness.results import main as results_main
from harness.store import SCHEMAS, Run, read_run, read_table

ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared" / "traces"
SMALL = ("clock=virtual", "limit.requests=60")


def run(folder: Path, *words: str) -> Run:
    assert main([*words, f"results_dir={folder}"]) == 0
    (manifest,) = folder.glob("*/manifest.json")
    return read_run(manifest.parent)


def hits_by_request(found: Run) -> list[tuple[Any, ...]]:
    ok = found.requests[found.requests["status"] == "ok"]
    columns = (
        "request_id",
        "planned_hit_p_tokens",
        "reported_hit_p_tokens",
        "planned_hit_md_tokens",
        "reported_hit_md_tokens",
    )
    return [tuple(row) for row in ok[list(columns)].itertuples(index=False)]


def check_planned_is_reported(found: Run) -> None:
    rows = hits_by_request(found)
    assert rows
    for request_id, planned_p, reported_p, planned_md, reported_md in rows:
        assert (request_id, planned_p, planned_md) == (request_id, reported_p, reported_md)


def test_two_virtual_runs_of_one_seed_have_equal_files(tmp_path: Path) -> None:
    runs = [run(tmp_path / name, *SMALL) for name in "ab"]
    for name in SCHEMAS:
        assert content_digest(runs[0].path, name) == content_digest(runs[1].path, name)


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    runs = [run(tmp_path / seed, *SMALL, f"seed={seed}") for seed in "12"]
    assert content_digest(runs[0].path, "requests") != content_digest(runs[1].path, "requests")


@pytest.mark.parametrize("engine", ["pdd", "cross_pd", "pd", "colocated"])
def test_planned_hits_are_reported_on_every_request_at_trace_times(engine: str, tmp_path: Path) -> None:
    check_planned_is_reported(run(tmp_path, f"engine={engine}", *SMALL))


@pytest.mark.parametrize("engine", ["pdd", "cross_pd"])
def test_planned_hits_are_reported_on_every_request_at_concurrency_one(engine: str, tmp_path: Path) -> None:
    check_planned_is_reported(run(tmp_path, f"engine={engine}", "load=closed", "load.concurrency=1", *SMALL))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real traces are not there")
@pytest.mark.parametrize(
    ("trace", "file"), [("mooncake", "mooncake_conversation.jsonl.gz"), ("weka", "weka_0006.json.gz")]
)
@pytest.mark.parametrize("load", ["sessions", "closed"])
def test_real_traces_replay_with_planned_hits_reported(trace: str, file: str, load: str, tmp_path: Path) -> None:
    found = run(
        tmp_path, f"trace={trace}", f"trace.path={SHARED / file}", f"load={load}", "clock=virtual", "limit.requests=200"
    )
    assert (found.requests["status"] == "ok").all()
    check_planned_is_reported(found)
    if trace == "weka":  # one session, its turns in order
        turns = found.requests[found.requests["phase"] == "measured"].sort_values("sent_ns")["turn"].tolist()
        assert turns == sorted(turns)


def test_every_planned_turn_ends_in_one_record_and_one_session_row_counts_it(tmp_path: Path) -> None:
    found = run(tmp_path, *SMALL)
    measured = found.requests[found.requests["phase"] == "measured"]
    assert measured["request_id"].is_unique
    sums = found.sessions[["turns_done", "turns_failed", "turns_skipped"]].sum(axis=1)
    assert (sums == found.sessions["turns_planned"]).all()
    assert int(found.sessions["turns_planned"].sum()) == len(measured)


def test_critical_spans_sum_to_each_requests_time(tmp_path: Path) -> None:
    found = run(tmp_path, *SMALL)
    critical = found.spans[found.spans["critical"]]
    lengths = (critical["end_ns"] - critical["start_ns"]).groupby(critical["request_id"]).sum()
    measured = found.requests.set_index("request_id")
    total = (measured["end_ns"] - measured["sent_ns"]).loc[lengths.index]
    assert (lengths == total).all()


def test_chunks_hold_every_output_token_once(tmp_path: Path) -> None:
    found = run(tmp_path, *SMALL)
    counted = found.chunks.groupby("request_id")["count"].sum()
    assert (counted == found.requests.set_index("request_id")["output_tokens"].loc[counted.index]).all()


def test_a_key_in_the_environment_reaches_no_file_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-planted-5e1f")
    found = run(tmp_path, *SMALL)
    for path in found.path.rglob("*"):
        if path.is_file():
            assert b"sk-planted-5e1f" not in path.read_bytes(), path


def _wait_for(condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def _ended(run_dir: Path) -> int:
    return read_table(run_dir, "requests").num_rows


def _workers_of(pid: int) -> list[int]:
    """Processes whose parent is `pid`."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(stat.parent.name))
    return found


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_harness_leaves_its_finished_requests_and_no_process(tmp_path: Path) -> None:
    environment = {**os.environ, "OPENAI_API_KEY": "sk-planted-5e1f"}
    command = [sys.executable, "-m", "harness", "limit.requests=60", f"results_dir={tmp_path}"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for(lambda: list(tmp_path.glob("*/manifest.json")), 60)
        run_dir = next(tmp_path.glob("*/manifest.json")).parent
        _wait_for(lambda: (run_dir / "parts" / "requests.arrows").exists() and _ended(run_dir) >= 12, 120)
        children = _workers_of(process.pid)
        assert len(children) == 4  # P, RLD, MD and the gateway
        before = _ended(run_dir)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() and _is_running(pid) for pid in children), 10)
    assert results_main(["recover", str(run_dir)]) == 0
    found = read_run(run_dir)
    assert len(found.requests) >= before
    assert found.manifest["status"] == "recovered"
    assert not found.manifest["validity"]["valid"]
    # Flushed at least twice a second: what ended half a second before the last row that was kept is all there, in
    # order.
    assert set(found.chunks["request_id"]) <= set(found.requests["request_id"])
    assert results_main(["recover", str(run_dir)]) == 0
    for path in run_dir.rglob("*"):
        if path.is_file():
            assert b"sk-planted-5e1f" not in path.read_bytes(), path


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_the_main_job_in_real_processes_is_whole_and_small(tmp_path: Path) -> None:
    found = run(tmp_path, "limit.requests=40")
    measured = found.requests[found.requests["phase"] == "measured"]
    assert len(measured) == 40
    assert (measured["status"] == "ok").all()
    check_planned_is_reported(found)
    last = found.instances[found.instances["time_ns"] == found.instances["time_ns"].max()]
    assert int(last["rss_bytes"].sum()) < 2_500_000_000
    kv = found.links[(found.links["direction"] == "forward") & (found.links["kv_bytes"] > 0)].sort_values("time_ns")
    planned = int(measured["planned_line_bytes"].sum())
    baseline = kv[kv["time_ns"] <= measured["sent_ns"].min()]["kv_bytes"].max()
    counted = int(kv["kv_bytes"].iloc[-1]) - int(baseline)
    assert abs(counted - planned) <= 0.01 * planned
    assert json.loads((found.path / "summary.json").read_text())["ok"] == 40


def test_a_run_with_failed_requests_ends_with_one_and_names_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "request_timeout_s=0.5", f"results_dir={tmp_path}"]) == 1
    (manifest,) = tmp_path.glob("*/manifest.json")
    reasons = json.loads(manifest.read_text())["validity"]["reasons"]
    assert any("no end within 0.5 s" in reason for reason in reasons)
    assert "not valid" in capsys.readouterr().out
