"""Everything derived from a run's files, each formula once. Times in seconds, sizes in bytes, shares in [0, 1];
missing is None, never 0.

Latencies are of requests with phase `measured` and status `ok`. What a metric cannot see is in its line of
`DEFINITIONS`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from traces.profile import BIN_LABELS, bin_shares

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType

    from harness.store import Run

Values = npt.NDArray[np.float64]
QUANTILES = (0.5, 0.9, 0.99)
MIN_BEYOND = 10
MAX_NULL_SHARE = 0.05
LATENCIES = ("ttft", "ttst", "tbt", "icl", "tpot", "e2el", "longest_gap", "ttft_scheduled")

DEFINITIONS = {
    "ttft": "first token of any channel at the client - sent. The client stands beside the router: no network between",
    "ttst": "second token - sent; with first_token=prefill it shows the wait that TTFT hides",
    "tbt": "gap between tokens (also ITL), over all of all requests: a chunk's first token gets the gap, its others 0",
    "icl": "gap between chunks",
    "tpot": "(last - first token) / (output tokens - 1), per request, None for one token; hides stalls (longest_gap)",
    "e2el": "last token - sent",
    "longest_gap": "longest gap between chunks, per request",
    "ttft_scheduled": "first token - the time at which the request was due: the client's own lateness is in it",
    "rps": "requests that ended ok / (last end - first sent)",
}


def percentile(values: Iterable[float] | Values, q: float, *, min_beyond: int = MIN_BEYOND) -> float | None:
    """The q-quantile (0..1) by linear interpolation between order statistics; None with fewer than `min_beyond`
    values beyond it."""
    found = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, dtype=np.float64)
    found = found[~np.isnan(found)]
    if found.size == 0 or found.size * (1 - q) < min_beyond - 1e-9:
        return None
    return float(np.quantile(found, q))


def request_latencies(requests: pd.DataFrame, chunks: pd.DataFrame) -> dict[str, Values]:
    """Per-request values in seconds by name (`tbt` and `icl` are per gap). Rows must be those to measure."""
    sent = requests["sent_ns"].to_numpy(dtype=np.float64)
    first = requests["first_token_ns"].to_numpy(dtype=np.float64)
    last = requests["last_token_ns"].to_numpy(dtype=np.float64)
    count = requests["output_tokens"].to_numpy(dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(count > 1, (last - first) / (count - 1), np.nan) / 1e9
    gaps, longest, num_extra = chunk_gaps(requests, chunks)
    return {
        "ttft": (first - sent) / 1e9,
        "ttst": (requests["second_token_ns"].to_numpy(dtype=np.float64) - sent) / 1e9,
        "tbt": np.concatenate([gaps, np.zeros(num_extra)]),
        "icl": gaps,
        "tpot": tpot,
        "e2el": (last - sent) / 1e9,
        "longest_gap": longest,
        "ttft_scheduled": (first - requests["scheduled_ns"].to_numpy(dtype=np.float64)) / 1e9,
    }


def chunk_gaps(requests: pd.DataFrame, chunks: pd.DataFrame) -> tuple[Values, Values, int]:
    """Gaps between chunks in seconds, the longest one per request, and how many tokens came with another in a chunk.

    A row with `step_ns` is `count` chunks of one token, that far apart.
    """
    mine = chunks[chunks["request_id"].isin(requests["request_id"])].sort_values(["request_id", "first_index"])
    if mine.empty:
        return np.zeros(0), np.zeros(0), 0
    ids = mine["request_id"].to_numpy()
    time = mine["time_ns"].to_numpy(dtype=np.float64)
    step = mine["step_ns"].to_numpy(dtype=np.float64)
    count = mine["count"].to_numpy(dtype=np.int64)
    ends = time + np.where(step > 0, (count - 1) * step, 0.0)
    is_same = ids[1:] == ids[:-1]
    between = (time[1:] - ends[:-1])[is_same] / 1e9
    within = np.repeat(step[step > 0] / 1e9, count[step > 0] - 1)
    num_extra = int((count[step == 0] - 1).sum())
    import pandas as pd

    per_request = pd.Series(np.concatenate([between, within])).groupby(
        np.concatenate([ids[1:][is_same], np.repeat(ids[step > 0], count[step > 0] - 1)])
    )
    return np.concatenate([between, within]), per_request.max().to_numpy(dtype=np.float64), num_extra


def distribution(values: Values) -> dict[str, Any]:
    """mean, p50, p90, p99 and how many are there and missing."""
    found = values[~np.isnan(values)]
    return {
        "mean": float(found.mean()) if found.size else None,
        **{f"p{round(q * 100)}": percentile(found, q) for q in QUANTILES},
        "max": float(found.max()) if found.size else None,
        "count": int(found.size),
        "null_count": int(values.size - found.size),
    }


def summarize(run: Run) -> dict[str, Any]:
    """All figures of the closing table, from the run's files alone; JSON-able."""
    measured = run.requests[run.requests["phase"] == "measured"]
    ok = measured[measured["status"] == "ok"]
    sent = measured[measured["sent_ns"].notna()]
    duration_s = float(sent["end_ns"].max() - sent["sent_ns"].min()) / 1e9 if len(sent) else None
    output_tokens = int(ok["output_tokens"].sum())
    latencies = request_latencies(ok, run.chunks)
    summary: dict[str, Any] = {
        "requests": len(measured),
        "ok": len(ok),
        "errors": {
            str(k): int(v) for k, v in measured.loc[measured["status"] != "ok", "status"].value_counts().items()
        },
        "sessions": int(measured["session_id"].nunique()),
        "duration_s": duration_s,
        "rps": len(ok) / duration_s if duration_s else None,
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / duration_s if duration_s else None,
        "prompt_tokens": int(ok["prompt_tokens"].sum()),
        **{name: distribution(latencies[name]) for name in LATENCIES},
        "prefix_hit": {name: _hits(ok, f"{name}_tokens") for name in _HIT_COLUMNS},
        "pipelines": {str(k): float(v) for k, v in ok["pipeline"].value_counts(normalize=True).items()},
        "rld_token_share": float(ok["eager_tokens"].sum()) / output_tokens if output_tokens else None,
        "line": _line(run, measured),
        "spans_s": _spans(run.spans, ok),
        "sending_late_s": distribution((ok["sent_ns"] - ok["scheduled_ns"]).to_numpy(dtype=np.float64) / 1e9),
    }
    summary["notes"] = _notes(summary)
    return summary


_HIT_COLUMNS = ("ideal_hit", "planned_hit_p", "planned_hit_md", "reported_hit_p", "reported_hit_md")


def _hits(ok: pd.DataFrame, column: str) -> dict[str, Any] | None:
    """Share of prompt tokens found, over all tokens and as a mean over requests, and the shares of requests in the
    seven bins."""
    known = ok[ok[column].notna()]
    if known.empty:
        return None
    hits = known[column].to_numpy(dtype=np.float64)
    prompts = known["prompt_tokens"].to_numpy(dtype=np.float64)
    return {
        "token_share": float(hits.sum() / prompts.sum()),
        "request_mean": float((hits / prompts).mean()),
        "bins": dict(zip(BIN_LABELS, bin_shares(hits / prompts), strict=True)),
    }


def _line(run: Run, measured: pd.DataFrame) -> dict[str, Any]:
    """KV bytes over the line: planned at admission, counted by receivers, and by the gateway (or the model) between
    the end of priming and the run's end. The gateway's count has the frames' headers in it; requests that ended on
    RLD are not in the receivers' count."""
    kv = run.links[(run.links["link"] == "line") & (run.links["direction"] != "back") & (run.links["kv_bytes"].notna())]
    total = None
    if len(kv) and measured["sent_ns"].notna().any():
        start_ns = measured["sent_ns"].min()
        totals = kv.groupby(["time_ns"])["kv_bytes"].sum()
        before = totals[totals.index <= start_ns]
        total = int(totals.iloc[-1] - (before.iloc[-1] if len(before) else 0))
    last = kv[kv["time_ns"] == kv["time_ns"].max()] if len(kv) else kv
    return {
        "planned_bytes": int(measured["planned_line_bytes"].sum()),
        "received_bytes": int(measured["line_bytes"].sum()),
        "gateway_bytes": total,
        "configured_rate_bps": _first(last, "configured_rate_bps"),
        "configured_flow_rate_bps": _first(last, "configured_flow_rate_bps"),
        "realised_rate_bps": _first(last, "realised_rate_bps"),
        "delay_p50_s": _scaled(_first(last, "delay_p50_ns"), 1e-9),
        "delay_p95_s": _scaled(_first(last, "delay_p95_ns"), 1e-9),
        "late_share": _first(last, "late_share"),
    }


def _first(frame: pd.DataFrame, column: str) -> float | None:
    known = frame[column].dropna()
    return float(known.iloc[0]) if len(known) else None


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _spans(spans: pd.DataFrame, ok: pd.DataFrame) -> dict[str, float]:
    """Mean seconds per request that a stream waited for each thing; the values sum to the mean of end - sent."""
    mine = spans[spans["critical"].astype(bool) & spans["request_id"].isin(ok["request_id"])]
    if mine.empty:
        return {}
    lengths = (mine["end_ns"] - mine["start_ns"]).groupby(mine["name"]).sum() / 1e9 / len(ok)
    return {str(name): float(value) for name, value in lengths.items()}


def _notes(summary: Mapping[str, Any]) -> list[str]:
    notes = []
    ttft = summary["ttft"]
    total = ttft["count"] + ttft["null_count"]
    if total and ttft["null_count"] > MAX_NULL_SHARE * total:
        notes.append(
            f"TTFT is missing for {ttft['null_count']} of {total} requests: its figures stand for the others alone"
        )
    if any(summary[name]["p99"] is None for name in ("ttft", "e2el")) and total:
        notes.append(f"P99 needs {MIN_BEYOND} requests beyond it and is left out")
    return notes


# --- the closing table ------------------------------------------------------------------------------------------------


def _s(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"


def _pct(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _mb(value: float | None) -> str:
    return "-" if value is None else f"{value / 1e6:,.2f} MB"


def summary_table(summary: Mapping[str, Any], manifest: Mapping[str, Any]) -> RenderableType:
    """The closing table. Its last line says what the run shows and what it does not."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    times = Table(title="latency", title_justify="left")
    times.add_column("metric")
    for name in ("mean", "P50", "P90", "P99", "n"):
        times.add_column(name, justify="right")
    labels = {
        "ttft": "TTFT",
        "ttst": "TTST",
        "tbt": "TBT",
        "tpot": "TPOT",
        "e2el": "E2EL",
        "longest_gap": "longest gap",
    }
    for key, label in labels.items():
        row = summary[key]
        times.add_row(label, _s(row["mean"]), _s(row["p50"]), _s(row["p90"]), _s(row["p99"]), f"{row['count']:,}")
    facts = Table(title="run", title_justify="left", show_header=False)
    facts.add_column()
    facts.add_column()
    for name, value in _facts(summary):
        facts.add_row(name, value)
    words = [Text(f"note: {note}") for note in summary["notes"]]
    return Group(times, facts, *words, Text(what_it_shows(manifest)))


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    line, hits = summary["line"], summary["prefix_hit"]
    errors = ", ".join(f"{count} {status}" for status, count in summary["errors"].items()) or "none"

    def hit(name: str) -> str:
        found = hits[name]
        return (
            "-"
            if found is None
            else f"{_pct(found['token_share'])} of tokens, {_pct(found['request_mean'])} mean of requests"
        )

    rate = (
        "-"
        if summary["rps"] is None
        else f"{summary['rps']:.2f} requests/s, {summary['output_tokens_per_s']:,.1f} output tokens/s"
    )
    spans = ", ".join(f"{name} {_s(value)}" for name, value in summary["spans_s"].items())
    return [
        (
            "requests",
            f"{summary['ok']:,} ok of {summary['requests']:,}, {summary['sessions']:,} sessions; not ok: {errors}",
        ),
        ("throughput", rate),
        ("tokens", f"{summary['prompt_tokens']:,} prompt, {summary['output_tokens']:,} output"),
        ("hit ideal (trace)", hit("ideal_hit")),
        ("hit planned at P", hit("planned_hit_p")),
        ("hit reported at P", hit("reported_hit_p")),
        ("hit planned at MD", hit("planned_hit_md")),
        ("hit reported at MD", hit("reported_hit_md")),
        ("pipelines", ", ".join(f"{name} {_pct(share)}" for name, share in summary["pipelines"].items()) or "-"),
        ("tokens by RLD", _pct(summary["rld_token_share"])),
        ("KV over the line", f"planned {_mb(line['planned_bytes'])}, counted on it {_mb(line['gateway_bytes'])}"),
        ("line", _line_words(line)),
        ("mean wait by cause", spans or "-"),
        (
            "sent after it was due",
            f"P50 {_s(summary['sending_late_s']['p50'])}, P90 {_s(summary['sending_late_s']['p90'])}",
        ),
    ]


def _line_words(line: Mapping[str, Any]) -> str:
    def mbit(value: float | None) -> str:
        return "-" if value is None else f"{value / 1e6:,.1f} Mbit/s"

    return (
        f"configured {mbit(line['configured_rate_bps'])} and {mbit(line['configured_flow_rate_bps'])} a flow, "
        f"realised while busy {mbit(line['realised_rate_bps'])}; one-way delay P50 {_s(line['delay_p50_s'])}, "
        f"P95 {_s(line['delay_p95_s'])}; late {_pct(line['late_share'])}"
    )


def what_it_shows(manifest: Mapping[str, Any]) -> str:
    """One sentence: real or virtual, scaled or not, valid or not and why, and what must not be read from it."""
    clock = manifest.get("clock")
    kind = (
        "real processes on the wall clock"
        if clock == "wall"
        else "virtual time: modelled durations, no process and no socket"
    )
    label = (manifest.get("similitude") or {}).get("label", "unknown scale")
    scale = (manifest.get("trace") or {}).get("scale")
    validity = manifest.get("validity") or {}
    valid = "valid" if validity.get("valid") else "NOT VALID: " + "; ".join(validity.get("reasons") or ["not said"])
    return (
        f"What this shows: {kind}; {label} (token counts x {scale}); {valid}. It compares policies on equal modelled "
        "chips; it does not predict any hardware's figures."
    )
