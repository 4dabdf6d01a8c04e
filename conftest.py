"""Settings of every test process, made before torch or hypothesis is used; holds no fixtures."""

from __future__ import annotations

import os

# Tests run in parallel: with two spinning threads a process they would slow each other twentyfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from hypothesis import settings

# No test may depend on how fast the machine is, and every run repeats exactly.
settings.register_profile("repeatable", deadline=None, derandomize=True)
# `pytest --hypothesis-profile=explore` looks for new examples.
settings.register_profile("explore", deadline=None, max_examples=500)
settings.load_profile("repeatable")
