"""The line between sites: one model (link.py), two bodies: timers on virtual time, a shaping TCP proxy (gateway.py)."""
