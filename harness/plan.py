"""What a run is expected to do: hits under caches that keep all, tokens, bytes, load against capacity. Sends nothing.

Planned hits have one definition, for any order of cache events: before a run the order is the sequential one, after it
the recorded
one. The plan knows no eviction, so a reported hit below it is a page that the cache lost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from engines.pdd.config import EngineSpec
from engines.pdd.policy import arranged
from engines.wan.link import LinkSpec
from harness.config import RunConfig
from harness.load import (
    LoadedTrace,
    Row,
    Selection,
    SessionPool,
    Want,
    hit_bins,
    in_lanes,
    run_timeline,
    select_from_start,
    select_snapshot,
    started_at,
    starts_at_rate,
)
from harness.replay import Prompts
from harness.similitude import Similitude, decode_token_s, line_of, prefill_s, similitude_of
from traces.errors import UserError
from traces.profile import BIN_LABELS
from traces.prompts import page_keys

if TYPE_CHECKING:
    from rich.console import RenderableType

REPRESENTATIVE_POINTS = 5.0
"""A slice with a bin further than this from the trace's, in points, is not representative."""


@dataclass(frozen=True, slots=True)
class PageKeys:
    """A request's prompt and output as page keys (chained, full pages of both together). Lengths in tokens."""

    keys: Sequence[bytes]
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Touch:
    """One cache event of `request_id` at an instance: match | insert_prompt | insert_full, in the order of `seq`."""

    seq: int
    request_id: str
    op: str


def planned_hits(
    order: Mapping[str, Iterable[Touch]], sequences: Mapping[str, PageKeys], page_size: int
) -> dict[str, dict[str, int]]:
    """instance -> request -> hit tokens, if no cache ever lost a page.

    A hit is the longest run of leading full pages present, at most floor((prompt - 1) / page) pages: one token is
    always computed.
    `insert_prompt` keeps floor(prompt / page) pages, `insert_full` floor((prompt + output - 1) / page): the last
    token has no KV.
    A request matched twice at one instance keeps the first answer.
    """
    planned: dict[str, dict[str, int]] = {}
    for instance, touches in order.items():
        kept: set[bytes] = set()
        hits = planned[instance] = {}
        for touch in sorted(touches, key=lambda touch: touch.seq):
            found = sequences.get(touch.request_id)
            if found is None:
                continue
            if touch.op == "match":
                if touch.request_id not in hits:
                    hits[touch.request_id] = _leading(found.keys, kept, (found.num_prompt - 1) // page_size) * page_size
            else:
                full = found.num_prompt if touch.op == "insert_prompt" else found.num_prompt + found.num_output - 1
                kept.update(found.keys[: full // page_size])
    return planned


def _leading(keys: Sequence[bytes], kept: set[bytes], limit: int) -> int:
    count = 0
    for key in keys[:limit]:
        if key not in kept:
            break
        count += 1
    return count


def hits_by_site(
    planned: Mapping[str, Mapping[str, int]], roles: Mapping[str, str]
) -> dict[str, tuple[int | None, int | None]]:
    """request -> (planned hit at P, at MD); a mixed instance is both."""
    found: dict[str, list[int | None]] = defaultdict(lambda: [None, None])
    for instance, hits in planned.items():
        role = roles.get(instance)
        for request_id, tokens in hits.items():
            if role in ("P", "MIXED"):
                found[request_id][0] = tokens
            if role in ("MD", "MIXED"):
                found[request_id][1] = tokens
    return {request_id: (p, md) for request_id, (p, md) in found.items()}


# --- before a run -----------------------------------------------------------------------------------------------------


def check_lengths(rows: Iterable[Row], max_context: int) -> None:
    """Raises UserError that names the first request whose prompt and output do not fit the model."""
    for row in rows:
        if row.input_tokens + row.output_tokens > max_context:
            raise UserError(
                f"trace: request {row.request_id} has a prompt of {row.input_tokens} and an output of "
                f"{row.output_tokens} tokens, more than the model's context of {max_context} (model.max_context); "
                "make trace.scale smaller"
            )


@dataclass(frozen=True, slots=True)
class Plan:
    """The a-priori figures of a run; shares are of capacity, 0 to 1 and above. Bytes are KV bytes."""

    num_requests: int
    num_sessions: int
    num_primed: int
    prime_tokens: int
    prompt_tokens: int
    output_tokens: int
    hit_tokens: int
    slice_bins: tuple[float, ...]
    trace_bins: tuple[float, ...]
    kv_bytes: int
    line_bytes: int
    duration_s: float
    prime_s: float
    offered_per_s: float
    p_share: float
    line_share: float | None
    md_share: float
    time_compression: float

    @property
    def is_representative(self) -> bool:
        """No hit bin of the slice is off the trace's by more than 5 points."""
        return all(abs(a - b) <= REPRESENTATIVE_POINTS for a, b in zip(self.slice_bins, self.trace_bins, strict=False))

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SequentialHits:
    """Hit tokens by request if each came after the one before had ended, caches keep all: the plan before a run."""

    p: Mapping[str, int]
    md: Mapping[str, int]


def sequential_hits(rows: Sequence[Row], prompts: Prompts, page_size: int) -> SequentialHits:
    """The plan for `rows` (primed ones first) one at a time. Outputs are the trace's; `prompts` must be a fresh source.

    P keeps prompts alone: outputs were decoded elsewhere. MD keeps prompts and outputs.
    """
    whole = {row.request_id: prompts.prompt(row.request_id) for row in rows}
    for row in rows:  # an output is read off the longest prompt that keeps it; what nobody keeps is never hit
        kept = whole[row.request_id][: row.keep_tokens]
        if row.prefix_id in whole and len(kept) > len(whole[row.prefix_id]):
            whole[row.prefix_id] = kept
    sequences = {
        row.request_id: PageKeys(page_keys(whole[row.request_id], page_size), row.input_tokens, row.output_tokens)
        for row in rows
    }
    orders = {}
    for site, ops in (("p", ("match", "insert_prompt")), ("md", ("match", "insert_prompt", "insert_full"))):
        touches = [(row.request_id, op) for row in rows for op in ops]
        orders[site] = [Touch(seq, name, op) for seq, (name, op) in enumerate(touches)]
    planned = planned_hits(orders, sequences, page_size)
    return SequentialHits(planned["p"], planned["md"])


def make_plan(
    selection: Selection, primes: Sequence[Row], hits: SequentialHits, trace_bins: Sequence[float], spec: EngineSpec
) -> Plan:
    """Figures of `selection` on `spec`, as arranged by its policy, with the hits of the sequential plan."""
    rows = [item.row for item in selection.planned]
    is_mixed = any(item.role == "MIXED" for item in spec.instances)
    md_hits = [hits.md[row.request_id] for row in rows]
    p_hits = md_hits if is_mixed else [hits.p[row.request_id] for row in rows]
    prompt_tokens, output_tokens = sum(row.input_tokens for row in rows), sum(row.output_tokens for row in rows)
    kv_per_token = spec.model.kv_bytes_per_token
    is_crossing = len({item.site for item in spec.instances}) > 1
    line_bytes = (prompt_tokens - (sum(md_hits) if spec.drc else 0)) * kv_per_token if is_crossing else 0

    service = ServiceModel(spec)
    starts = run_timeline(selection.planned, service)
    duration_s = max(starts[row.request_id] + service(row.input_tokens, row.output_tokens) for row in rows)
    per_s = 1.0 / max(duration_s, 1e-9)
    prefills = [item for item in spec.instances if item.role in ("P", "MIXED")]
    mains = [item for item in spec.instances if item.role in ("MD", "MIXED")]
    computed = sum(prefill_s(prefills[0], row.input_tokens - hit) for row, hit in zip(rows, p_hits, strict=True))
    decode = sum(row.output_tokens * decode_token_s(mains[0].timing) for row in rows)
    line_rate = spec.line.rate_bps if is_crossing else None
    return Plan(
        num_requests=len(rows),
        num_sessions=selection.num_sessions,
        num_primed=len(primes),
        prime_tokens=sum(row.input_tokens for row in primes),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        hit_tokens=sum(md_hits),
        slice_bins=tuple(hit_bins([hit / row.input_tokens for row, hit in zip(rows, md_hits, strict=True)])),
        trace_bins=tuple(trace_bins),
        kv_bytes=prompt_tokens * kv_per_token,
        line_bytes=line_bytes,
        duration_s=duration_s,
        prime_s=sum(prefill_s(prefills[0], row.input_tokens) for row in primes) / len(prefills),
        offered_per_s=len(rows) * per_s,
        p_share=computed * per_s / len(prefills),
        line_share=None if line_rate is None else line_bytes * 8 * per_s / line_rate,
        md_share=decode * per_s / sum(item.max_batch_seqs for item in mains),
        time_compression=selection.time_compression,
    )


class ServiceModel:
    """(prompt, output) -> expected seconds of a request with a mean hit, alone: what the run's timeline is made
    with.
    """

    MEAN_HIT = 0.9

    def __init__(self, spec: EngineSpec) -> None:
        self._prefill = next(item for item in spec.instances if item.role in ("P", "MIXED"))
        self._main = next(item for item in spec.instances if item.role in ("MD", "MIXED"))

    def __call__(self, prompt_tokens: int, output_tokens: int) -> float:
        uncached = round(prompt_tokens * (1 - self.MEAN_HIT))
        return prefill_s(self._prefill, uncached) + output_tokens * decode_token_s(self._main.timing)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that is decided before anything starts."""

    config: RunConfig
    spec: EngineSpec
    selection: Selection
    primes: tuple[Row, ...]
    prompts: Prompts
    hits: SequentialHits
    plan: Plan
    similitude: Similitude
    trace_info: Mapping[str, object]

    @property
    def what(self) -> str:
        """One line: what kind of run this is."""
        config = self.config
        time = "wall clock, real processes" if config.clock == "wall" else "virtual time, one process"
        tokens = (
            "no model computes: times only"
            if config.executor_kind == "roofline"
            else f"tokens sampled from {config.model.name}"
        )
        return (
            f"{config.engine.policy} on {config.trace.name} ({self.trace_info['origin']}): {time}, {tokens}, "
            f"{config.executor_kind} steps; lengths x {config.trace.scale:g}; {self.similitude.label}"
        )


def prepare(config: RunConfig, trace: LoadedTrace) -> Prepared:
    """Choose the slice, set the line, check that every request fits the model. Raises UserError."""
    page_size = config.cluster.page_size
    trace_bins = hit_bins([row.hit_share(page_size) for row in trace.rows])
    blank = config.engine_spec(LinkSpec(name="line"))
    _, spec = arranged(blank)
    selection = choose(config, trace, ServiceModel(spec), trace_bins)
    rows = [item.row for item in selection.planned]
    primes = tuple(trace.by_id[name] for name in selection.prime_ids if name in trace.by_id)
    check_lengths([*primes, *rows], config.model.max_context)
    decode = next(item for item in spec.instances if item.role in ("MD", "MIXED"))
    line = line_of(config.wan, rows, decode_token_s(decode.timing), config.model.kv_bytes_per_token)
    spec = replace(spec, line=line)
    hits = sequential_hits([*primes, *rows], trace.prompts(config, rows), page_size)
    plan = make_plan(selection, primes, hits, trace_bins, spec)
    similitude = similitude_of(spec, rows, primes, hits, plan)
    return Prepared(
        config,
        replace(blank, line=line),
        selection,
        primes,
        trace.prompts(config, rows),
        hits,
        plan,
        similitude,
        trace.info,
    )


def choose(config: RunConfig, trace: LoadedTrace, service: ServiceModel, trace_bins: Sequence[float]) -> Selection:
    """The slice, as load and start ask for it."""
    want = Want(
        num_requests=config.num_requests(), requests_per_s=config.load.requests_per_s,
        num_running=config.load.running_sessions, max_sessions=config.limit.sessions,
        time_compression=config.time_compression,
    )  # fmt: skip
    kind = config.load.kind
    if kind == "sessions" and (config.start or ("snapshot" if trace.has_sessions else "cold")) == "snapshot":
        pool = SessionPool(trace.rows, trace.slice_start_s, service)
        return select_snapshot(pool, want, f"{config.seed}/{config.slice}", config.cluster.page_size, trace_bins)
    if kind != "sessions" and config.time_compression is None:
        want = replace(want, time_compression=1 / config.trace.scale)  # gaps shrink as lengths and service times do
    selection = select_from_start(trace.rows, want, service, start_trace_s=trace.slice_start_s)
    if kind == "rate":
        count = len({item.row.root_session_id for item in selection.planned})
        return started_at(
            selection, starts_at_rate(count, config.load.sessions_per_s, config.load.arrivals, config.seed)
        )
    return in_lanes(selection, config.load.concurrency) if kind == "concurrency" else selection


def plan_table(plan: Plan) -> RenderableType:
    """The plan for a terminal."""
    from rich.table import Table

    table = Table(title="plan", title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    add = table.add_row
    add("requests", f"{plan.num_requests:,} from {plan.num_sessions:,} sessions")
    add("primed before", f"{plan.num_primed:,} histories, {plan.prime_tokens:,} tokens, about {plan.prime_s:.0f} s")
    add("tokens", f"{plan.prompt_tokens:,} prompt, {plan.output_tokens:,} output")
    add("expected hit", f"{plan.hit_tokens / plan.prompt_tokens:.1%} of prompt tokens (caches that keep all)")
    add("KV", f"{_size(plan.kv_bytes)} of prompts; {_size(plan.line_bytes)} over the line")
    add(
        "offered",
        f"{plan.offered_per_s:.2f} requests/s for {plan.duration_s:.0f} s, "
        f"time compressed {plan.time_compression:g} times",
    )
    line = "none" if plan.line_share is None else f"{plan.line_share:.0%}"
    add("use of capacity", f"P {plan.p_share:.0%}, line {line}, MD's batch {plan.md_share:.0%}")
    add("time", f"about {plan.prime_s + plan.duration_s:.0f} s after the start")
    return table


def bins_table(plan: Plan) -> RenderableType:
    """The slice's planned hit bins beside the trace's, in percent of requests."""
    from rich.table import Table

    table = Table(title="share of requests by planned hit, %", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("")
    for name in BIN_LABELS:
        table.add_column(name.replace("[", r"\["), justify="right")
    table.add_row("slice", *(f"{x:.1f}" for x in plan.slice_bins))
    table.add_row("trace", *(f"{x:.1f}" for x in plan.trace_bins))
    return table


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.2f} GB"
