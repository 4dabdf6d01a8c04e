"""How a scaled run resembles the full-size system: the ratios that decide who waits for what, and the line that
follows from one.

The full-size values are data with their source. What nobody has published is None, and a run is never called `scaled`
on the strength
of a value that is not known.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from engines.pdd.config import EngineSpec, InstanceSpec, StepTiming
from engines.wan.link import LinkSpec
from harness.config import WanConfig
from harness.load import Row

if TYPE_CHECKING:
    from rich.console import RenderableType

    from harness.plan import Plan, SequentialHits

TOLERANCE = 0.25

# Source of all: technical report of PDD (arXiv:2609.13161) as the press and public summaries give it, model
# DeepSeek-V4-pro,
# 64K prompt tokens, 90% mean hit, 1K output tokens, a line of 20 Gbit/s and 20 ms; decode at 20 ms a token (10-30
# published).
# "inferred" values follow from several published ones; None is not published.
FULL_SIZE: dict[str, tuple[float | None, str]] = {
    "prefill of the uncached part / decode of an output": (None, "not published"),
    "whole prompt over one flow / decode of an output": (
        0.95,
        "inferred: 19 s for a full miss (transfer P99 18.9 s) over 20 s",
    ),
    "round trip / decode of an output": (0.001, "20 ms over 20 s"),
    "line rate / flow cap": (133.0, "inferred: 20 Gbit/s over about 150 Mbit/s a connection (120-190)"),
    "use of P": (None, "not published"),
    "use of the line": (0.90, "about 18 of 20 Gbit/s at 80 requests/s with the decode-side cache"),
    "use of MD's batch": (None, "not published"),
    "working set / MD's cache": (None, "not published"),
    "page / median uncached suffix": (None, "not published"),
    "step overhead / median TTFT": (None, "not published"),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """One ratio, full size and here. `here` None: it does not apply (no line)."""

    name: str
    full: float | None
    source: str
    here: float | None

    @property
    def is_within(self) -> bool | None:
        """Within 25% of full size; None where that cannot be known."""
        if self.full is None or self.here is None:
            return None
        return abs(self.here - self.full) <= TOLERANCE * self.full


@dataclass(frozen=True, slots=True)
class Similitude:
    """All ratios of a run and what they allow to say of it."""

    ratios: tuple[Ratio, ...]

    @property
    def label(self) -> Literal["scaled", "demonstration"]:
        """`scaled` if every ratio is known and within 25%; else `demonstration`."""
        return "scaled" if all(ratio.is_within for ratio in self.ratios) else "demonstration"

    def as_dict(self) -> dict[str, object]:
        return {
            "label": self.label,
            "tolerance": TOLERANCE,
            "ratios": [
                {"name": r.name, "full_size": r.full, "source": r.source, "here": r.here, "within": r.is_within}
                for r in self.ratios
            ],
        }


def prefill_s(instance: InstanceSpec, num_tokens: int) -> float:
    """Modelled time to prefill `num_tokens` alone, in chunks (StepTiming's formula without the attention term)."""
    full, rest = divmod(max(1, num_tokens), instance.prefill_chunk_tokens)
    timing = instance.timing
    return sum(
        count * (timing.base_s + max(tokens * timing.prefill_token_s, timing.weights_s))
        for count, tokens in ((full, instance.prefill_chunk_tokens), (1 if rest else 0, rest))
    )


def decode_token_s(timing: StepTiming) -> float:
    """Modelled time of one decode step at short context."""
    return timing.base_s + timing.weights_s


def line_of(wan: WanConfig, rows: Sequence[Row], decode_step_s: float, kv_bytes_per_token: int) -> LinkSpec:
    """The line of a run. similar: flow rate so that (mean prompt's KV over one flow) / (decode of a mean output) =
    `wan.ratio`, and a
    rate of `wan.flows` such flows. Rates in bit/s."""
    line = LinkSpec.from_config(wan.preset())
    if wan.kind == "fixed":
        return line
    prompt = statistics.fmean(row.input_tokens for row in rows)
    output = statistics.fmean(row.output_tokens for row in rows)
    flow_rate_bps = prompt * kv_bytes_per_token * 8 / (wan.ratio * output * decode_step_s)
    return replace(line, flow_rate_bps=flow_rate_bps, rate_bps=wan.flows * flow_rate_bps)


def similitude_of(
    spec: EngineSpec, rows: Sequence[Row], primes: Sequence[Row], hits: SequentialHits, plan: Plan
) -> Similitude:
    """The ratios of the slice `rows` on `spec`; `plan` gives the use of P, line and MD."""
    prefill = next(item for item in spec.instances if item.role in ("P", "MIXED"))
    mains = [item for item in spec.instances if item.role in ("MD", "MIXED")]
    decode_s = statistics.fmean(row.output_tokens for row in rows) * decode_token_s(mains[0].timing)
    suffixes = [row.input_tokens - hits.md[row.request_id] for row in rows]
    prefills = [prefill_s(prefill, row.input_tokens - hits.p[row.request_id]) for row in rows]
    ttft_s = statistics.median(prefills) + decode_token_s(mains[0].timing)
    prompt_bits = statistics.fmean(row.input_tokens for row in rows) * spec.model.kv_bytes_per_token * 8
    has_line = plan.line_share is not None
    line = spec.line
    working_set = sum(suffixes) + sum(row.output_tokens for row in rows) + sum(row.input_tokens for row in primes)
    cache = sum(item.num_pages for item in mains) * spec.page_size
    here: dict[str, float | None] = {
        "prefill of the uncached part / decode of an output": statistics.fmean(prefills) / decode_s,
        "whole prompt over one flow / decode of an output": (
            prompt_bits / line.flow_rate_bps / decode_s if has_line and line.flow_rate_bps else None
        ),
        "round trip / decode of an output": line.rtt_s / decode_s if has_line else None,
        "line rate / flow cap": line.rate_bps / line.flow_rate_bps
        if has_line and line.rate_bps and line.flow_rate_bps
        else None,
        "use of P": plan.p_share,
        "use of the line": plan.line_share,
        "use of MD's batch": plan.md_share,
        "working set / MD's cache": working_set / cache,
        "page / median uncached suffix": spec.page_size / statistics.median(suffixes),
        "step overhead / median TTFT": prefill.timing.base_s / ttft_s,
    }
    return Similitude(tuple(Ratio(name, full, source, here[name]) for name, (full, source) in FULL_SIZE.items()))


def similitude_table(similitude: Similitude) -> RenderableType:
    """The ratios for a terminal, with the label."""
    from rich.table import Table

    table = Table(title=f"similitude: {similitude.label}", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for name in ("ratio", "full size", "here", "within 25%", "full size from"):
        table.add_column(name)
    for ratio in similitude.ratios:
        within = "?" if ratio.is_within is None else "yes" if ratio.is_within else "no"
        table.add_row(ratio.name, _number(ratio.full), _number(ratio.here), within, ratio.source)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
