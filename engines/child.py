"""What a child process of ours gets and knows: its environment, that its parent lives, how much memory it takes."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_KEPT_VARIABLES = frozenset({"PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "SYSTEMROOT"})


def child_environment() -> dict[str, str]:
    """What a child gets to see: this package's folder on its path, one thread for numerics, no keys of the user's."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.environ.get("PYTHONPATH", "")
    return {
        **{name: value for name, value in os.environ.items() if name in _KEPT_VARIABLES},
        "PYTHONPATH": root + (os.pathsep + path if path else ""),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies (Linux; elsewhere a closed stdin has to do)."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died in between
            os._exit(1)


def rss_bytes(pid: int | str = "self") -> int:
    """Resident memory of a process in bytes; 0 where /proc is missing."""
    try:
        with open(f"/proc/{pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
