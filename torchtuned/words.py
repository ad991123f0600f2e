"""The words and bounds of a request and a grant, which the command line, the daemon and the configuration take alike.

Nothing that costs, since torchtuned-run imports it before every job. share/torchtuned/schemas has the same.
"""

POLICIES = ("exclusive", "node", "socket", "core-complex")
MEMORY = ("local", "preferred", "bind", "interleave")
CONFINE = ("cpuset", "affinity", "none")
ENV_PROFILES = ("cpu", "memory", "compile", "debug")
LIMITS = ("nofile", "memlock", "core", "oom_score_adj")
LIMIT_WORDS = ("keep", "hard", "infinity")
MAX_RANKS = 4096  # of a job, and as many GPUs
FULL = "no core is free"


def is_full(warning: str) -> bool:
    """Whether a warning of a grant says so of the whole job: those of placement/space.py begin with these words."""
    return warning.startswith(FULL)
