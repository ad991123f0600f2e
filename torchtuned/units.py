"""Which cgroups a process is in, and which of systemd's units, by the text of its /proc/PID/cgroup; and what the scope
of a job is called. Pure, and light: it runs before every job.
"""

from __future__ import annotations


def cgroups(text: str) -> dict[str, str]:
    """The process's paths by controller; "" is the unified hierarchy."""
    found: dict[str, str] = {}
    for line in text.split("\n"):  # users name cgroups, with other ends of lines in the names
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number.isdecimal() and path.startswith("/"):
            found.update(dict.fromkeys(controllers.split(","), path))
    return found


def place(text: str) -> str:
    """The path in the hierarchy that systemd uses; "" at its root, as in a container."""
    found = cgroups(text)
    return next((path for name in ("", "name=systemd") if (path := found.get(name, "/")) != "/"), "")


def unit(text: str) -> str:
    """The innermost unit of PID 1's, "" where there is none. What is beneath a user's manager is that user's."""
    units = [part for part in place(text).split("/") if part.endswith((".service", ".scope"))]
    manager = next((unit for unit in units if unit.startswith("user@")), "")
    return manager or (units[-1] if units else "")


def service(text: str) -> str:
    """The service of the system's, "" without one: a login session is none, and neither is a user's manager, whose
    restart would end all that the user runs.
    """
    found = unit(text)
    return found if found.endswith(".service") and not found.startswith("user@") else ""


def scope_of(job_id: str) -> str:
    """The name of the scope that PID 1 makes for a job."""
    return f"torchtuned-job-{job_id}.scope"


def job_of(unit: str) -> str:
    """The id of the job whose scope has this name, "" for other units."""
    job_id = unit.removeprefix("torchtuned-job-").removesuffix(".scope")
    return job_id if unit == scope_of(job_id) else ""
