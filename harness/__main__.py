"""`python -m harness key=value ...`: the edge. Words become objects, a trace becomes rows; then one run.

A user's error is one line and exit code 2; only a bug shows a traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from harness.config import GROUPS, chosen, group_choices, load_config, top_keys
from traces.errors import UserError

USER_ERROR_CODE = 2
INTERRUPTED_CODE = 130

EXAMPLES = (
    ("python -m harness", "the main job: pdd on synthetic agents, real processes, a shaped line"),
    (
        "python -m harness engine=cross_pd clock=virtual seed=1 limit.requests=200",
        "no relay, on virtual time, in seconds",
    ),
    (
        "python -m harness trace=mooncake trace.path=trace.jsonl.gz limit.requests=200 dry_run=true",
        "the plan of a real trace",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 all well, 1 a request failed, 2 the user can mend it, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if any(word in ("-h", "--help", "help") for word in words):
            print(help_text())
            return 0
        config, plain = load_config(words)
        from harness.run import execute
        from harness.source import load_trace

        return execute(config, plain, words, load_trace(config))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return USER_ERROR_CODE
    except KeyboardInterrupt:
        print("interrupted before the run began", file=sys.stderr)
        return INTERRUPTED_CODE
    except BrokenPipeError:  # the reader of our output is gone
        return 1


def help_text() -> str:
    """Choices of every group with a line each, the other keys, three examples."""
    default = chosen([])
    lines = [
        "usage: python -m harness [key=value ...]",
        "",
        "One run of a trace against an engine; results go to results/.",
        "",
    ]
    lines.append("choices (* is the default):")
    for group in GROUPS:
        for name, text in group_choices(group).items():
            mark = "*" if default.get(group) == name else " "
            lines.append(f"  {mark} {f'{group}={name}':24}{text}")
        lines.append("")
    lines.append("other keys, with their defaults:")
    lines += [f"    {f'{key}={value}':32}{text}" for key, value, text in top_keys()]
    lines += [
        "",
        "Any key of a chosen file can be set too: cluster.page_size=32, trace.scale=0.0625, model.dtype=float64.",
        "",
    ]
    lines.append("examples:")
    for command, text in EXAMPLES:
        lines += [f"  {command}", f"      {text}"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
