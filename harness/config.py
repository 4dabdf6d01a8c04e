"""The command line and conf/ turned into plain, checked objects, once, at the edge; and the ground that a run stands
on.

Hydra is known here and nowhere else. A key that conf/ does not have is refused with the nearest one that it has.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.metadata
import importlib.resources
import logging
import os
import platform
import subprocess
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from engines.pdd.config import DeciderSpec, EngineSpec, InstanceSpec, ModelSpec
from engines.wan.link import LinkSpec
from traces.errors import UserError

GROUPS = ("engine", "trace", "load", "wan", "cluster", "model")


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration: an unknown key or a wrong type is an error that names it."""


class TraceConfig(Config, frozen=True):
    name: str
    scale: float = 1.0
    path: str | None = None
    answers: Literal["reused", "absent"] | None = None


class LoadConfig(Config, frozen=True):
    kind: Literal["sessions", "rate", "concurrency"]
    requests_per_s: float = 3.0
    duration_s: float = 60.0
    running_sessions: int = 28
    sessions_per_s: float = 0.5
    arrivals: Literal["constant", "poisson"] = "poisson"
    concurrency: int = 1


class LimitConfig(Config, frozen=True):
    requests: int | None = None
    sessions: int | None = None
    time_s: float | None = None


class SamplingConfig(Config, frozen=True):
    temperature: float = 0.0


class EngineConfig(Config, frozen=True):
    """`build` names what makes the engine, module:callable, called as build(EngineSpec, Clock, run_dir)."""

    policy: str
    build: str = "engines.pdd.engine:PddEngine"
    drc: bool = True
    decider: DeciderSpec = DeciderSpec()
    kv_frame_tokens: int = 128


class LocalConfig(Config, frozen=True):
    rate_bps: float | None = 8.0e9
    rtt_s: float = 0.0
    lanes: int = 4


class ClusterConfig(Config, frozen=True):
    instances: tuple[InstanceSpec, ...]
    timing: dict[str, Any] = {}
    local: LocalConfig = LocalConfig()
    page_size: int = 16
    base_port: int = 0
    device: str = "auto"
    worker_nice: int = 5


class WanConfig(Config, frozen=True):
    """`kind` similar: rates follow from `ratio` and `flows` (harness/similitude.py); fixed: they are given."""

    kind: Literal["similar", "fixed"] = "fixed"
    name: str = "line"
    ratio: float = 1.0
    flows: int = 2
    rate_mbps: float | None = None
    flow_mbps: float | None = None
    rtt_ms: float = 0.0
    jitter_ms: float = 0.0
    lanes: int = 8

    def preset(self) -> dict[str, object]:
        """The keys of a line (LinkSpec.from_config)."""
        return {
            "name": "line", "rate_mbps": self.rate_mbps, "flow_mbps": self.flow_mbps, "rtt_ms": self.rtt_ms,
            "jitter_ms": self.jitter_ms, "lanes": self.lanes,
        }  # fmt: skip


class RunConfig(Config, frozen=True):
    """One run, whole. `choices` names what was chosen in each group."""

    engine: EngineConfig
    trace: TraceConfig
    load: LoadConfig
    wan: WanConfig
    cluster: ClusterConfig
    model: ModelSpec
    limit: LimitConfig = LimitConfig()
    sampling: SamplingConfig = SamplingConfig()
    clock: Literal["wall", "virtual"] = "wall"
    seed: int = 0
    dry_run: bool = False
    slice: int = 0
    start: Literal["snapshot", "cold"] | None = None
    history: Literal["live", "recorded"] = "live"
    time_compression: float | None = None
    executor: Literal["paced", "unpaced", "roofline"] | None = None
    first_token: Literal["decode", "prefill"] = "decode"
    request_timeout_s: float = 120.0
    prime_concurrency: int = 4
    results_dir: str = "results"
    choices: dict[str, str] = {}

    @property
    def executor_kind(self) -> Literal["paced", "unpaced", "roofline"]:
        return self.executor or ("roofline" if self.clock == "virtual" else "paced")

    def num_requests(self) -> int:
        return self.limit.requests or max(1, round(self.load.requests_per_s * self.load.duration_s))

    def engine_spec(self, line: LinkSpec) -> EngineSpec:
        """What the engine is built from; `line` comes from similitude or from the preset."""
        return EngineSpec(
            policy=self.engine.policy,
            instances=self.cluster.instances,
            line=line,
            local=LinkSpec(
                name="local", rate_bps=self.cluster.local.rate_bps, rtt_s=self.cluster.local.rtt_s,
                lanes=self.cluster.local.lanes,
            ),
            model=self.model,
            decider=self.engine.decider,
            page_size=self.cluster.page_size,
            executor=self.executor_kind,
            first_token=self.first_token,
            drc=self.engine.drc,
            kv_frame_tokens=self.engine.kv_frame_tokens,
            base_port=self.cluster.base_port,
            device=self.cluster.device,
            worker_nice=self.cluster.worker_nice,
        )  # fmt: skip


def load_config(overrides: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """The checked configuration of `overrides` and the same as a plain dict for the manifest. Raises UserError."""
    from hydra import compose, initialize_config_module
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    logging.getLogger("hydra").setLevel(logging.ERROR)
    with initialize_config_module("conf", version_base="1.3", job_name="pdd-harness"):
        _refuse_unknown(overrides, compose)
        try:
            composed = compose("config", list(overrides))
            plain = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
        except (HydraException, OmegaConfBaseException) as error:
            raise UserError(f"{' '.join(overrides) or 'conf'}: {_first_line(error)}") from None
    assert isinstance(plain, dict)
    config = {str(key): value for key, value in plain.items()}
    config["choices"] = chosen(overrides)
    return checked(config), config


def checked(config: Mapping[str, Any]) -> RunConfig:
    """`config` as objects; raises UserError that names the key that is wrong."""
    _refuse_strays(dict(config), RunConfig, "")
    try:
        run = msgspec.convert(dict(config), RunConfig)
    except msgspec.ValidationError as error:
        message, _, where = str(error).partition(" - at `$")
        raise UserError(
            f"{where.strip('`').lstrip('.') or 'configuration'}: {message[0].lower()}{message[1:]}"
        ) from None
    _check_ranges(run)
    return run


def _refuse_strays(node: Any, kind: Any, where: str) -> None:
    """Raises UserError for a key that the dataclass it would fill does not have: conversion alone would drop it."""
    if isinstance(node, list) and typing.get_origin(kind) is tuple:
        for number, item in enumerate(node):
            _refuse_strays(item, typing.get_args(kind)[0], f"{where.rstrip('.')}[{number}].")
    elif isinstance(node, dict) and (dataclasses.is_dataclass(kind) or hasattr(kind, "__struct_fields__")):
        types = typing.get_type_hints(kind)
        for key, value in node.items():
            if key not in types:
                raise UserError(f"{where}{key}: unknown key; {_nearest(str(key), sorted(types))}")
            _refuse_strays(value, types[key], f"{where}{key}.")


def _check_ranges(run: RunConfig) -> None:
    positive: list[tuple[str, float | None]] = [
        ("trace.scale", run.trace.scale),
        ("load.requests_per_s", run.load.requests_per_s),
        ("load.duration_s", run.load.duration_s),
        ("load.running_sessions", run.load.running_sessions),
        ("limit.requests", run.limit.requests),
        ("limit.sessions", run.limit.sessions),
        ("limit.time_s", run.limit.time_s),
        ("time_compression", run.time_compression),
        ("request_timeout_s", run.request_timeout_s),
        ("prime_concurrency", run.prime_concurrency),
        ("cluster.page_size", run.cluster.page_size),
        ("wan.ratio", run.wan.ratio),
        ("wan.flows", run.wan.flows),
    ]
    for key, value in positive:
        if value is not None and value <= 0:
            raise UserError(f"{key}: must be above 0, got {value}")
    if run.model.dtype not in ("float32", "float64", "bfloat16"):
        raise UserError(f"model.dtype: must be float32, float64 or bfloat16, got {run.model.dtype}")
    if run.model.num_kv_heads < 1 or run.model.num_heads % run.model.num_kv_heads:
        raise UserError(
            f"model.num_kv_heads: must divide num_heads={run.model.num_heads}, got {run.model.num_kv_heads}"
        )
    if not 0 <= run.sampling.temperature < 1e6:
        raise UserError(f"sampling.temperature: must be 0 or more, got {run.sampling.temperature}")
    if not 0 <= run.slice <= 9:
        raise UserError(f"slice: must be 0 to 9, got {run.slice}")
    if run.start == "snapshot" and run.load.kind != "sessions":
        raise UserError(f"start: snapshot needs load=sessions; load={run.load.kind} starts cold (start=cold)")
    if run.clock == "wall" and run.executor == "roofline":
        raise UserError("executor: roofline computes no tokens and needs clock=virtual; use executor=paced")


# --- what there is to choose ------------------------------------------------------------------------------------------


def group_choices(group: str) -> dict[str, str]:
    """name -> first comment line of each file in conf/<group>; a name that begins with `_` is shared, no choice."""
    folder = importlib.resources.files("conf") / group
    found = {}
    if folder.is_dir():
        for entry in sorted(folder.iterdir(), key=lambda item: item.name):
            if entry.name.endswith(".yaml") and not entry.name.startswith("_"):
                first = entry.read_text(encoding="utf-8").partition("\n")[0]
                found[entry.name.removesuffix(".yaml")] = first.removeprefix("#").strip()
    return found


def chosen(overrides: Sequence[str]) -> dict[str, str]:
    """group -> chosen name, defaults included."""
    text = (importlib.resources.files("conf") / "config.yaml").read_text(encoding="utf-8")
    found = {}
    for line in text.partition("_self_")[0].splitlines():
        name, colon, value = line.strip().removeprefix("- ").partition(":")
        if colon and name in GROUPS:
            found[name] = value.strip()
    for override in overrides:
        name, _, value = override.partition("=")
        if name in GROUPS:
            found[name] = value
    return found


def top_keys() -> list[tuple[str, str, str]]:
    """(key, default, first sentence of the comment above it) of every key in conf/config.yaml."""
    text = (importlib.resources.files("conf") / "config.yaml").read_text(encoding="utf-8").partition("- _self_\n")[2]
    found, parent, comment = [], "", ""
    for line in text.splitlines():
        word = line.strip()
        if word.startswith("#"):
            comment = comment or word.removeprefix("#").strip()
        elif word:
            name, _, value = word.partition(":")
            parent = parent if line.startswith(" ") else ""
            if value:
                found.append((f"{parent}{name}", value.strip(), comment))
            else:
                parent = f"{name}."
            comment = ""
    return found


def _refuse_unknown(overrides: Sequence[str], compose: Any) -> None:
    """Raises UserError for a word that is no key=value, a choice that is no file, a key that the composed config
    does not have.
    """
    from omegaconf import OmegaConf

    groups = []
    for override in overrides:
        key, equals, value = override.partition("=")
        if "oc.env" in value:
            raise UserError(f"{key}: values of the environment never enter a configuration; write the value itself")
        if not equals:
            raise UserError(f"{override!r}: expected key=value (see --help)")
        if key in GROUPS:
            choices = group_choices(key)
            if value not in choices:
                raise UserError(f"{key}={value}: {_nearest(value, choices)}; choices: {', '.join(choices)}")
            groups.append(override)
    known = sorted(_keys(OmegaConf.to_container(compose("config", groups))))
    for override in overrides:
        key = override.partition("=")[0]
        if key not in GROUPS and key not in known:
            raise UserError(f"{key}: unknown key; {_nearest(key.lstrip('+~'), [*known, *GROUPS])}")


def _keys(node: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from _keys(value, f"{prefix}{name}.")


def _nearest(word: str, known: Sequence[str] | Mapping[str, str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    if not close:  # the last part alone may say what was meant
        by_leaf = {name.rpartition(".")[2]: name for name in known}
        leaf = difflib.get_close_matches(word.rpartition(".")[2], list(by_leaf), n=1, cutoff=0.5)
        close = [by_leaf[leaf[0]]] if leaf else []
    return f"did you mean {close[0]}?" if close else "see --help for the known ones"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


# --- the ground: versions, commit, machine; never the host's name, never a value of the environment -------------------


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("pdd-harness", "torch", "numpy", "pyarrow", "pandas", "msgspec", "hydra-core", "uvloop"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def git_commit() -> str | None:
    """The commit of the checkout that this code runs from, `-dirty` added when files differ; None outside of one."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=root, capture_output=True, text=True, timeout=5, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def machine() -> dict[str, object]:
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                cpu = line.partition(":")[2].strip()
                break
    return {
        "cpu": cpu, "cores": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "system": platform.system(),
    }  # fmt: skip
