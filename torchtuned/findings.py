"""What a check of the host can say: a finding, or that it could not look. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from torchtuned.cpuset import CpuSet, format_list, parse_list

UNCHECKED = "unchecked"  # in the place of a severity, where nobody could look
MEMORY = "memory"  # what a finding is about: the memory of the host, which all jobs share


def about_gpu(address: str) -> str:
    """A GPU as what a finding is about."""
    return f"gpu/{address}"


def about_cpus(which: CpuSet) -> str:
    """CPUs as what a finding is about."""
    return f"cpus/{format_list(which)}"


def about_job(job_id: str) -> str:
    """A job as what a finding is about."""
    return f"job/{job_id}"


class Severity(StrEnum):
    """ERROR: training fails or is wrong. WARNING: it is slower than it need be, or at risk. NOTICE: worth knowing."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


class Action(StrEnum):
    """Who acts on a finding. AUTO: torchtuned's policy can, and give it back. JOB: while a job runs.

    ASK: a person decides, and `fix` is the command. TELL: nothing to run; `fix` says what to look at.
    """

    AUTO = "AUTO"
    JOB = "JOB"
    ASK = "ASK"
    TELL = "TELL"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault of one thing. `title` names it, `evidence` is what was seen (values, addresses), `cost` what it does
    to training, `fix` the way out, `source` where the rule comes from, `job` the id of the job that it was seen in.
    `about`: what suffers while it lasts, by which it is told at the running jobs that have that (about_gpu(),
    about_cpus(), about_job(), MEMORY); nothing for what only the next job, the next boot or an administrator feels."""

    code: str
    severity: Severity
    action: Action
    title: str
    evidence: str
    cost: str
    fix: str
    source: str
    job: str = ""
    about: tuple[str, ...] = ()

    def concerns(self, job_id: str, *, cpus: CpuSet, gpus: Collection[str]) -> bool:
        """Whether a running job with these CPUs and GPUs (PCI addresses) feels it."""
        if self.job:
            return self.job == job_id
        for kind, _, which in (thing.partition("/") for thing in self.about):
            if kind == MEMORY or (kind == "job" and which == job_id) or (kind == "gpu" and which in gpus):
                return True
            if kind == "cpus" and cpus & parse_list(which):
                return True
        return False

    def document(self) -> dict[str, str]:
        """As `torchtuned check --json` and D-Bus have it; `action` is called "class" there, "about" has its words
        parted by blanks, and "job" and "about" are left out when empty."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "class": str(self.action),
            "title": self.title,
            "evidence": self.evidence,
            "cost": self.cost,
            "fix": self.fix,
            "source": self.source,
        } | {name: text for name, text in (("job", self.job), ("about", " ".join(self.about))) if text}


@dataclass(frozen=True, kw_only=True)
class Unchecked:
    """A check that could not look, fully or at one thing, and why. It is not "fine"."""

    code: str
    because: str

    def document(self) -> dict[str, str]:
        """As `torchtuned check --json` has it."""
        return {"code": self.code, "because": self.because}

    def row(self) -> dict[str, str]:
        """As D-Bus has it, among the findings: with a severity of its own, UNCHECKED."""
        return {
            "code": self.code,
            "severity": UNCHECKED,
            "class": str(Action.TELL),
            "title": "could not be checked",
            "evidence": self.because,
            "cost": "",
            "fix": "",
            "source": "",
        }
