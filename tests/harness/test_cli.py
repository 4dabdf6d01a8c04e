"""The command as a person meets it: help, plans, one-line errors, results on every way out."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from engines.base import (
    Completion,
    Engine,
    EngineInfo,
    EngineReport,
    EngineStartError,
    GenerateRequest,
    TokenArray,
    TokenStream,
)
from engines.clock import Clock
from engines.pdd.config import EngineSpec
from harness.config import RunConfig, load_config
from harness.load import LoadedTrace, Row
from harness.run import execute

ROOT = Path(__file__).resolve().parents[2]


def agents() -> list[Row]:
    """Twelve sessions of eight turns, two of them running before the slice's start at 100 s."""
    rows = []
    for number in range(12):
        for turn in range(8):
            name, size = f"s{number}.{turn}", 200 + 40 * turn
            rows.append(
                Row(
                    name, f"s{number}", f"s{number}", turn, "main", f"s{number}.{turn - 1}" if turn else None,
                    size - 30 if turn else 0, size, 12, 20.0 * number if turn == 0 else None,
                    (f"s{number}.{turn - 1}",) if turn else (), 10.0, False, 5.0,
                )
            )  # fmt: skip
    return rows


class Prompts:
    """Each turn's prompt is the last one's, its output and some new tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = {row.request_id: row for row in rows}
        self._made: dict[str, TokenArray] = {}
        self._outputs: dict[str, list[int]] = {}

    def prompt(self, request_id: str) -> TokenArray:
        if request_id not in self._made:
            row = self._rows[request_id]
            rng = np.random.default_rng(int(request_id[1:].replace(".", "9")))
            kept = np.zeros(0, dtype=np.int32)
            if row.prefix_id is not None:
                output = self._outputs.get(row.prefix_id, [9] * 12)
                kept = np.concatenate([self.prompt(row.prefix_id), np.asarray(output, dtype=np.int32)])[
                    : row.keep_tokens
                ]
            new = rng.integers(8, 1000, row.input_tokens - len(kept))
            self._made[request_id] = np.concatenate([kept, new]).astype(np.int32)
        return self._made[request_id]

    def filled_history_tokens(self, request_id: str) -> int:
        return 0

    def note_output(self, request_id: str, token_ids: list[int]) -> None:
        self._outputs[request_id] = token_ids


def trace() -> LoadedTrace:
    rows = agents()
    info = {"name": "invented", "origin": "synthetic"}
    return LoadedTrace(
        rows, {row.request_id: row for row in rows}, 100.0, True, info, lambda config, asked: Prompts(rows)
    )


class InstantEngine:
    """An engine that answers at once, or after `service_s`."""

    def __init__(self, clock: Clock, service_s: float = 0.0) -> None:
        self._clock = clock
        self._service_s = service_s
        self.is_closed = False

    async def start(self) -> EngineInfo:
        return EngineInfo("instant", "none", 64, 1000, 16, 1, {"m0": "MIXED"})

    async def generate(self, request: GenerateRequest, stream: TokenStream) -> Completion:
        await self._clock.sleep(self._service_s)
        stream.tokens(self._clock.now_ns(), [7] * request.max_tokens, "MD")
        return Completion("length", len(request.prompt), request.max_tokens)

    async def report(self) -> EngineReport:
        return EngineReport(self._clock.now_ns(), (), ())

    async def set_phase(self, phase: str) -> None:
        pass

    async def close(self) -> None:
        self.is_closed = True


def instant(spec: EngineSpec, clock: Clock, run_dir: Path) -> Engine:
    return InstantEngine(clock)


def configured(tmp_path: Path, *overrides: str) -> tuple[RunConfig, dict[str, object], list[str]]:
    words = [f"results_dir={tmp_path}/results", "limit.requests=30", *overrides]
    config, plain = load_config(words)
    return config, plain, words


def manifest_in(tmp_path: Path) -> dict[str, object]:
    (path,) = (tmp_path / "results").glob("*/manifest.json")
    found: dict[str, object] = json.loads(path.read_text())
    return found


def harness(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "harness", *words],
        cwd=cwd, capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip


def test_help_names_every_choice_from_any_folder(tmp_path: Path) -> None:
    result = harness("--help", cwd=tmp_path)
    assert result.returncode == 0
    for word in ("engine=cross_pd", "trace=mooncake", "wan=similar", "load=closed", "dry_run", "examples:"):
        assert word in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["load.requets_per_s=2"], "load.requests_per_s"),
        (["engine=nothing"], "choices: colocated"),
        (["seed=many"], "seed"),
    ],
)
def test_a_users_error_is_one_line_with_code_2(words: list[str], said: str, tmp_path: Path) -> None:
    result = harness(*words, cwd=tmp_path)
    assert result.returncode == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_harness_itself_never_imports_torch(tmp_path: Path) -> None:
    code = "import sys, harness.run, engines.pdd.engine; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}).returncode
        == 0
    )


@pytest.mark.parametrize("engine", ["pdd", "cross_pd", "pd", "colocated"])
def test_every_policy_runs_the_slice_on_virtual_time(engine: str, tmp_path: Path) -> None:
    out = io.StringIO()
    config, plain, words = configured(tmp_path, f"engine={engine}", "clock=virtual")
    assert execute(config, plain, words, trace(), console=Console(file=out, width=120)) == 0
    manifest = manifest_in(tmp_path)
    assert manifest["status"] == "complete"
    assert manifest["validity"] == {"valid": True, "reasons": []}
    assert "virtual time" in out.getvalue() and "similitude" in out.getvalue()


def test_the_same_run_works_on_the_wall_clock(tmp_path: Path) -> None:
    config, plain, words = configured(tmp_path, "load.requests_per_s=200", "limit.requests=40")
    code = execute(config, plain, words, trace(), engine_factory=instant, console=Console(file=io.StringIO()))
    assert (code, manifest_in(tmp_path)["status"]) == (0, "complete")


def test_a_dry_run_prints_the_plan_and_runs_nothing(tmp_path: Path) -> None:
    out = io.StringIO()
    config, plain, words = configured(tmp_path, "dry_run=true")
    assert execute(config, plain, words, trace(), console=Console(file=out, width=120)) == 0
    for word in ("requests", "expected hit", "over the line", "use of capacity", "similitude", "share of requests"):
        assert word in out.getvalue()
    assert list(tmp_path.iterdir()) == []


def test_an_engine_that_does_not_start_leaves_a_failed_run_and_one_error(tmp_path: Path) -> None:
    class Unstartable(InstantEngine):
        async def start(self) -> EngineInfo:
            raise EngineStartError("port 7000 is in use; set cluster.base_port")

    config, plain, words = configured(tmp_path)
    with pytest.raises(EngineStartError, match="7000"):
        execute(
            config, plain, words, trace(), console=Console(file=io.StringIO()),
            engine_factory=lambda spec, clock, run_dir: Unstartable(clock),
        )  # fmt: skip
    assert manifest_in(tmp_path)["status"] == "failed"


def test_an_interrupt_stops_cleanly_with_results(tmp_path: Path) -> None:
    engines: list[InstantEngine] = []

    def slow(spec: EngineSpec, clock: Clock, run_dir: Path) -> Engine:
        engines.append(InstantEngine(clock, service_s=30.0))
        return engines[0]

    config, plain, words = configured(tmp_path, "prime_concurrency=8")
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    code = execute(config, plain, words, trace(), engine_factory=slow, console=Console(file=io.StringIO()))
    assert code == 130
    manifest = manifest_in(tmp_path)
    assert manifest["status"] == "interrupted"
    assert "SIGINT" in str(manifest["validity"])
    assert engines[0].is_closed


def test_no_value_of_the_environment_enters_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-do-not-write-me")
    config, plain, words = configured(tmp_path, "clock=virtual")
    execute(config, plain, words, trace(), console=Console(file=io.StringIO()))
    for path in (tmp_path / "results").rglob("*"):
        assert not path.is_file() or b"do-not-write-me" not in path.read_bytes()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    config, plain, words = configured(tmp_path, "clock=virtual", "limit.requests=3")
    for _ in range(2):
        execute(config, plain, words, trace(), console=Console(file=io.StringIO()))
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_a_prompt_too_long_for_the_model_is_named_before_anything_starts(tmp_path: Path) -> None:
    result_dir = tmp_path / "results"
    config, plain, words = configured(tmp_path, "model.max_context=300")
    with pytest.raises(Exception, match=r"request s\d+\.\d"):
        execute(config, plain, words, trace(), console=Console(file=io.StringIO()))
    assert not result_dir.exists()
