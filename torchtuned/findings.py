"""What a check of the host can say: a finding, or that it could not look. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

UNCHECKED = "unchecked"  # in the place of a severity, where nobody could look


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
    to training, `fix` the way out, `source` where the rule comes from, `job` the id of the job that it concerns."""

    code: str
    severity: Severity
    action: Action
    title: str
    evidence: str
    cost: str
    fix: str
    source: str
    job: str = ""

    def document(self) -> dict[str, str]:
        """As `torchtuned check --json` and D-Bus have it; `action` is called "class" there, "job" is left out when
        the finding is about the host."""
        return {
            "code": self.code,
            "severity": str(self.severity),
            "class": str(self.action),
            "title": self.title,
            "evidence": self.evidence,
            "cost": self.cost,
            "fix": self.fix,
            "source": self.source,
        } | ({"job": self.job} if self.job else {})


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
