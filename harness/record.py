"""What is kept of a request, raw: time stamps, counts, stages. Nothing here is derived but the spans, which partition
the client's wait.

Times are in ns on the run's clock. None means unknown or not passed, never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engines.base import Completion

STAGES = (
    "received", "md_reserved", "decided", "prefill_start", "prefill_end", "kv_first_sent", "rld_ready", "md_ready",
    "seal", "extend_start", "commit", "finished",
)  # fmt: skip
STATUSES = ("ok", "truncated", "error_inband", "error_http", "error_net", "timeout", "aborted", "skipped")
PHASES = ("prime", "warmup", "measured", "drain")


@dataclass(slots=True)
class RequestRecord:
    """One row of requests.parquet; the fields' order is the columns'. results/README.md has every column's meaning."""

    request_id: str
    session_id: str
    root_session_id: str
    turn: int
    kind: str
    phase: str = "measured"
    status: str = "skipped"
    error: str | None = None
    scheduled_ns: int | None = None
    timeline_ns: int | None = None
    ready_ns: int | None = None
    sent_ns: int | None = None
    first_byte_ns: int | None = None
    first_token_ns: int | None = None
    second_token_ns: int | None = None
    last_token_ns: int | None = None
    end_ns: int | None = None
    prefix_id: str | None = None
    keep_tokens: int | None = None
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    filled_history_tokens: int | None = None
    page_size: int | None = None
    ideal_hit_tokens: int | None = None
    planned_hit_p_tokens: int | None = None
    planned_hit_md_tokens: int | None = None
    reported_hit_p_tokens: int | None = None
    reported_hit_md_tokens: int | None = None
    server_cached_tokens: int | None = None
    pipeline: str | None = None
    first_token_site: str | None = None
    p_instance: str | None = None
    rld_instance: str | None = None
    md_instance: str | None = None
    eager_tokens: int | None = None
    line_bytes: int | None = None
    local_bytes: int | None = None
    planned_line_bytes: int | None = None
    stage_received_ns: int | None = None
    stage_md_reserved_ns: int | None = None
    stage_decided_ns: int | None = None
    stage_prefill_start_ns: int | None = None
    stage_prefill_end_ns: int | None = None
    stage_kv_first_sent_ns: int | None = None
    stage_rld_ready_ns: int | None = None
    stage_md_ready_ns: int | None = None
    stage_seal_ns: int | None = None
    stage_extend_start_ns: int | None = None
    stage_commit_ns: int | None = None
    stage_finished_ns: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that came at once: those of index `first_index` and on. With `step_ns` they came that far apart (a run
    of steps)."""

    first_index: int
    time_ns: int
    step_ns: int
    count: int
    source: str


class SpanRow(NamedTuple):
    """What a stream waited for in [start_ns, end_ns). Rows with `critical` partition sent..end; others overlap them."""

    request_id: str
    name: str
    start_ns: int
    end_ns: int
    critical: bool
    instance: str | None


@dataclass(slots=True)
class StreamRecorder:
    """A TokenStream that keeps chunks and token ids, and the first, second and last token's times in its record."""

    record: RequestRecord
    chunks: list[Chunk] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    def tokens(self, time_ns: int, token_ids: Sequence[int], source: str) -> None:
        """Take one chunk. An empty one changes nothing: a missing time stays missing."""
        if not len(token_ids):
            return
        record = self.record
        before = len(self.token_ids)
        self.chunks.append(Chunk(before, time_ns, 0, len(token_ids), source))
        self.token_ids.extend(token_ids)
        if before == 0:
            record.first_byte_ns = record.first_token_ns = time_ns
        if before < 2 <= len(self.token_ids):
            record.second_token_ns = time_ns
        record.last_token_ns = time_ns


def apply_completion(record: RequestRecord, completion: Completion) -> None:
    """Copy what the engine counted into the record."""
    record.finish_reason = completion.finish_reason
    record.prompt_tokens = completion.prompt_tokens
    record.output_tokens = completion.output_tokens
    record.pipeline = completion.pipeline
    record.first_token_site = completion.first_token_site
    record.reported_hit_p_tokens = completion.cached_tokens.get("P")
    record.reported_hit_md_tokens = completion.cached_tokens.get("MD")
    record.server_cached_tokens = completion.cached_tokens.get("server")
    record.p_instance = completion.instances.get("P")
    record.rld_instance = completion.instances.get("RLD")
    record.md_instance = completion.instances.get("MD")
    record.eager_tokens = completion.eager_tokens
    record.line_bytes = completion.bytes_by_link.get("line")
    record.local_bytes = completion.bytes_by_link.get("local")
    record.planned_line_bytes = completion.planned_bytes_by_link.get("line")
    for stage, time_ns in completion.stages_ns.items():
        setattr(record, f"stage_{stage}_ns", time_ns)


def spans_of(record: RequestRecord) -> list[SpanRow]:
    """The partition of [sent_ns, end_ns] by what the stream waited for; its lengths sum to end - sent exactly.

    p-md: queue, prefill, line (to the first token), main. p-rld-md: queue, prefill, relay (RDMA move and RLD's
    decoding; to the end if RLD finished), handoff (seal to extend), extend (to commit), main. mixed: queue, prefill,
    main. Another server: server (to the first token), main. A time that was not passed takes no share; one that lies
    outside is clamped.
    """
    if record.sent_ns is None or record.end_ns is None:
        return []
    cuts: list[tuple[str, int | None, str | None]]
    if record.stage_prefill_end_ns is None:
        cuts = [
            ("server" if record.stage_received_ns is None else "queue", record.first_token_ns, None),
            ("main", None, None),
        ]
    else:
        cuts = [
            ("queue", record.stage_prefill_start_ns, None),
            ("prefill", record.stage_prefill_end_ns, record.p_instance),
        ]
        if record.pipeline == "p-md":
            cuts.append(("line", record.first_token_ns, None))
        elif record.pipeline == "p-rld-md":
            if record.stage_commit_ns is None:
                cuts.append(("relay", record.end_ns, record.rld_instance))
            else:
                cuts.append(("relay", record.stage_seal_ns, record.rld_instance))
                cuts.append(("handoff", record.stage_extend_start_ns, None))
                cuts.append(("extend", record.stage_commit_ns, record.md_instance))
        cuts.append(("main", None, record.md_instance))
    spans: list[SpanRow] = []
    at_ns = record.sent_ns
    for name, until_ns, instance in cuts:
        stop_ns = record.end_ns if until_ns is None else min(max(until_ns, at_ns), record.end_ns)
        if stop_ns > at_ns:
            spans.append(SpanRow(record.request_id, name, at_ns, stop_ns, True, instance))
        at_ns = stop_ns
    if (
        record.pipeline == "p-rld-md"
        and record.stage_kv_first_sent_ns is not None
        and record.stage_md_ready_ns is not None
    ):
        spans.append(
            SpanRow(record.request_id, "line", record.stage_kv_first_sent_ns, record.stage_md_ready_ns, False, None)
        )
    return spans
