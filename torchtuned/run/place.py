"""Where torchtuned-run gets its place: from torchtunedd, else by itself.

The order with the daemon is: register, move, commit. What the daemon answers is checked before anything is done with
it (run/trust.py). Whatever keeps the daemon from giving a place leads to placing without it, except where the request
itself is what is wrong, or where the administrator's rules say no.
"""

from __future__ import annotations

import json
import os
import sys
import time

from torchtuned import errors
from torchtuned.client import MANAGER, ROOT, Client, has_systemd, printable
from torchtuned.cpuset import format_list, parse_list
from torchtuned.run.trust import trusted
from torchtuned.words import FULL, MAX_RANKS, is_full

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from torchtuned.run.launchers import Launcher
    from torchtuned.run.options import Options

COMMIT_S = 10.0  # PID 1 makes a scope meanwhile, and a busy one takes its time
POLL_S = 5.0
ABSENT_S = 10.0  # how long the daemon may be away, to be restarted, while a job waits
BACK_S = 3.0  # the same for a job that has its place granted
ASK_S = 0.2
SHOWN = 4096  # characters of the command that the daemon is told, to show
JOB = "org.torchtuned1.Job"
# placing without the daemon would fail as well, or go against the administrator
FINAL = (errors.InvalidRequest, errors.NoSuchGpu, errors.Unplaceable, errors.Busy)


class InsideJob(errors.TorchtunedError):
    """This very process is a job already: a script that was started by torchtuned-run execs torchtuned-run."""


class Forgotten(errors.TorchtunedError):
    """The daemon that is back does not know of a job that was waiting."""


class Interrupted(errors.TorchtunedError):
    """The daemon went away, or forgot the job, when it was granting a place: `cause` is how that showed. No `job`:
    what it had granted is not known.
    """

    def __init__(self, job: str, cause: errors.TorchtunedError) -> None:
        super().__init__(cause.what)
        self.job, self.cause = job, cause


class Place:
    """A grant (checked, or our own), who gave it, and how to give it back when the command cannot be started."""

    __slots__ = ("by", "give_back", "grant")

    def __init__(self, grant: dict[str, Any], by: str, give_back: Callable[[], None]) -> None:
        self.grant, self.by, self.give_back = grant, by, give_back


def say(text: str) -> None:
    """A line for the user. A standard error that is closed, full or gone must neither end the job nor change its exit
    status: what stayed in sys.stderr's buffer would make the interpreter end with one of its own.
    """
    if sys.stderr is not None:
        try:
            os.write(2, f"torchtuned-run: {text}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            pass


def quoted(word: str) -> str:
    """A word of the command line as a message may show it: an empty or odd one in quotes."""
    return word if word.isprintable() and word.strip() == word != "" else ascii(word)


def wishes(options: Options, environ: dict[str, str], launcher: Launcher | None) -> dict[str, Any]:
    """The request document (share/torchtuned/schemas/request.json)."""
    words: list[str] = []
    room = SHOWN
    for word in options.command[:64]:
        words.append("".join(sign if sign.isprintable() else "?" for sign in word[: min(256, room)]))
        room -= len(words[-1])
        if room <= 0:
            break
    visible, order = environ.get("CUDA_VISIBLE_DEVICES"), environ.get("CUDA_DEVICE_ORDER")
    ranks = options.ranks
    if ranks is None and launcher is not None:
        ranks = launcher.ranks
        if ranks is None and options.gpus is not None:
            ranks = launcher.with_gpus(options.gpus if isinstance(options.gpus, int) else len(options.gpus))
        elif ranks is None and visible is not None:
            ranks = launcher.with_gpus(len([entry for entry in visible.split(",") if entry.strip()]))
    return {
        "schema": 1,
        "command": words,
        "gpus": options.gpus,
        "cuda_visible_devices": None if visible is None else visible.encode("utf-8", "replace").decode(),
        "cuda_device_order": None if order is None else order.encode("utf-8", "replace").decode(),
        "ranks": ranks,
        "policy": options.policy,
        "cpus": options.cpus,
        "shared": options.shared,
        "memory": options.memory,
        "confine": options.confine,
        "wait": options.wait,
    }


def find_place(options: Options, environ: dict[str, str], launcher: Launcher | None) -> Place:
    """From the daemon, else by ourselves. Raises what is wrong with the request, or with the machine for it."""
    request = wishes(options, environ, launcher)
    # torchrun --nproc-per-node=gpu with nothing that says how many: as many as the machine has
    counted = launcher if request["ranks"] is None and request["gpus"] is None else None
    mask = os.sched_getaffinity(0)
    try:
        return from_daemon(options, request, frozenset(mask), counted)
    except FINAL:
        raise
    except errors.TorchtunedError as error:
        if options.require and not isinstance(error, InsideJob):
            hint = error.hint if has_systemd() else ""
            raise errors.Failed(f"{error.what}; --require was given", hint=hint) from None
        if os.sched_getaffinity(0) != mask:
            os.sched_setaffinity(0, mask)
        problem = error
    from torchtuned.run import selfplace

    inside = isinstance(problem, InsideJob)
    ranks = None if counted is None else counted.with_gpus
    grant = selfplace.place_self(
        request,
        pid=os.getpid(),
        dry=options.explain or inside,
        ranks=ranks,
        waits=lambda why: None if options.quiet else say(f"waiting: {why}"),
    )
    settle_count(counted, grant["gpus_here"])
    if not options.quiet and not options.explain:
        where = f"placed without torchtunedd on CPUs {grant['cpus']}"
        if grant["sharers"]:
            where += f", {_shared(grant)}"
        elif not inside:
            where += f", apart from {grant['apart']}"
        if not grant["apart"]:
            where = "not kept to any CPUs, because without /proc nothing tells which are free"
        say(f"{problem.what}; {where}")
    return Place(grant, "torchtuned-run", lambda: selfplace.forget(os.getpid()))


def _shared(grant: dict[str, Any]) -> str:
    """With whom a place of our own is shared, and the way out, in the words of this line and no further one."""
    from torchtuned.run import waiting

    own = [text for text in grant["warnings"] if is_full(text)]
    grant["warnings"] = [text for text in grant["warnings"] if text not in own]
    why = f" ({FULL}; --wait waits for one)" if own else ""
    return f"shared with {waiting.some(grant['sharers'])}{why}"


def settle_count(launcher: Launcher | None, gpus: int) -> None:
    """ "auto" means one rank per CPU where there is no GPU."""
    if launcher is not None and launcher.count == "auto" and not gpus:
        launcher.count = "cpu"


def from_daemon(options: Options, request: dict[str, Any], mask: frozenset[int], counted: Launcher | None) -> Place:
    """Register, move, commit; with --explain register and give it back. Raises errors as find_place takes them.

    `counted`: a launcher whose number of ranks is the machine's number of GPUs.
    """
    client = Client()
    try:
        return keep_asking(client, options, request, mask, counted)
    except BaseException:
        client.close()  # its descriptors may be what is missing for placing without it
        raise


def keep_asking(
    client: Client, options: Options, request: dict[str, Any], mask: frozenset[int], counted: Launcher | None
) -> Place:
    """Ask anew where a daemon that went away comes back."""
    if counted is not None and counted.count in ("gpu", "gpus", "auto"):
        gpus = client.properties(ROOT, MANAGER).get("Gpus")
        gpus = min(gpus, MAX_RANKS) if isinstance(gpus, int) else 0
        request = {**request, "ranks": counted.with_gpus(gpus)}
        settle_count(counted, gpus)
    deadline = time.monotonic() + options.wait if options.wait else None
    once_more = True
    while True:
        try:
            return take_place(client, options, request, mask, deadline)
        except Forgotten:
            pass  # it waits anew, behind those who wait now
        except Interrupted as error:
            # placing without it would put the job on CPUs that the daemon, once it is back, takes for free
            if not once_more or not is_back(client):
                raise error.cause from None
            once_more = False
            os.sched_setaffinity(0, mask)
            if error.job:
                release(client, error.job)


def is_back(client: Client) -> bool:
    """Whether a daemon that was there just now answers within BACK_S, as after a restart."""
    until = time.monotonic() + BACK_S
    while True:
        try:
            client.properties(ROOT, MANAGER)
            return True
        except errors.TorchtunedError:
            if time.monotonic() >= until:
                return False
        time.sleep(ASK_S)


def release(client: Client, job: str) -> None:
    """Give a job back. An uncommitted grant expires anyway, and a committed one ends with this process."""
    try:
        client.call(ROOT, MANAGER, "Release", "o", job)
    except errors.TorchtunedError:
        pass


def take_place(
    client: Client, options: Options, request: dict[str, Any], mask: frozenset[int], deadline: float | None
) -> Place:
    """Register, wait for a place until the deadline, move, commit."""
    begun = time.monotonic()
    try:
        job, answer = register(client, request)
    except errors.DaemonUnreachable as error:
        if isinstance(error, errors.NoAnswer) and time.monotonic() - begun < client.timeout_s:
            raise Interrupted("", error) from None  # it ended while it was asked
        raise

    def give_back() -> None:
        release(client, job)

    try:
        grant = read_grant(answer, mask)
        if grant["state"] == "queued":
            grant = wait_for(client, job, grant, options, mask, deadline)
        if options.explain:
            give_back()
        else:
            if grant["confinement"] == "affinity":
                confine(grant)
            try:
                committed = client.call(ROOT, MANAGER, "Commit", "o", job, timeout_s=COMMIT_S)
            except (errors.DaemonUnreachable, errors.NoSuchJob) as error:
                raise Interrupted(job, error) from None
            grant = read_grant(committed[0] if committed else None, mask)
    except Interrupted:
        raise
    except BaseException:
        give_back()
        raise
    return Place(grant, "torchtunedd", give_back)


def register(client: Client, request: dict[str, Any]) -> tuple[str, object]:
    """The job's object path, and its grant as it came."""
    try:
        pidfd = os.pidfd_open(os.getpid())
    except OSError as error:  # too many open files
        raise errors.Failed(f"torchtunedd cannot be asked: {str(error.strerror).lower()}") from None
    try:
        answer = client.call(ROOT, MANAGER, "Register", "hs", pidfd, json.dumps(request, ensure_ascii=False))
    except errors.InvalidRequest:
        jobs = [interfaces.get(JOB, {}) for interfaces in client.objects().values()]
        if any(job.get("Pid") == os.getpid() for job in jobs):
            raise InsideJob("this process is a job of torchtunedd already") from None
        raise
    finally:
        os.close(pidfd)
    if len(answer) != 2 or not str(answer[0]).startswith(ROOT + "/jobs/"):
        raise errors.Failed("torchtunedd's answer to Register is not understood")
    return str(answer[0]), answer[1]


def read_grant(text: object, mask: frozenset[int]) -> dict[str, Any]:
    """The checked grant. Raises Failed."""
    try:
        document = json.loads(text if isinstance(text, str) else "")
    except (ValueError, RecursionError):
        raise errors.Failed("torchtunedd's grant is not JSON") from None
    try:
        return trusted(document, mask)
    except errors.Failed as error:
        raise errors.Failed(f"torchtunedd's grant is not accepted: {error}") from None


def wait_for(
    client: Client, job: str, grant: dict[str, Any], options: Options, mask: frozenset[int], deadline: float | None
) -> dict[str, Any]:
    """Wait until a queued job has its place: a signal says so; now and then the job is looked at as well.

    A daemon that is restarted meanwhile knows its queue afterwards. Placing without it in between would put the job on
    CPUs that others have, ahead of all who wait. Raises Busy when the time is up, Forgotten when the daemon came back
    without this job, DaemonUnreachable when it does not come back within ABSENT_S.
    """
    client.watch("Granted")
    why = grant["warnings"][0] if grant["warnings"] else "nothing is free"
    if options.explain:
        raise errors.Busy(why, hint="the job would wait")
    if not options.quiet:
        say(f"waiting: {why}")
    begun = time.monotonic() if deadline is None else deadline - (options.wait or 0)
    absent_since = 0.0
    was_away = False

    def in_vain() -> errors.Busy:
        from torchtuned.run import waiting

        known = [] if absent_since else holders(client, job, options, mask)  # who hangs is not waited for once more
        return waiting.in_vain(round(time.monotonic() - begun, 1), why, known)

    while True:
        left = POLL_S if deadline is None else deadline - time.monotonic()
        try:
            state = client.properties(job, JOB).get("State")
            absent_since = 0.0
            if state == "granted":
                return {**grant, "confinement": "none"}  # what it got comes with Commit
            if left <= 0:
                raise in_vain()
            signalled = client.wait_signal("Granted", min(left, POLL_S))
        except errors.DaemonUnreachable:
            was_away, absent_since = True, absent_since or time.monotonic()
            if left <= 0:
                raise in_vain() from None
            if time.monotonic() - absent_since >= ABSENT_S:
                raise
            time.sleep(min(left, ASK_S))
            continue
        except errors.Failed:
            if was_away:
                raise Forgotten("torchtunedd does not know this job any more") from None
            raise in_vain() from None  # the daemon counts as well
        if signalled is not None and len(signalled) == 2 and signalled[0] == job:
            return read_grant(signalled[1], mask)


def holders(client: Client, own: str, options: Options, mask: frozenset[int]) -> list[str]:
    """Who has what a job waited for, in words; nobody where the daemon does not say."""
    from torchtuned.run.waiting import holder

    try:
        objects = client.objects()
    except errors.TorchtunedError:
        return []
    found = []
    for path, interfaces in objects.items():
        job = interfaces.get(JOB, {})
        number, uid, cpus, gpus = (job.get(name) for name in ("Id", "Uid", "Cpus", "Gpus"))
        if path == own or not isinstance(uid, int) or not isinstance(gpus, list):
            continue
        try:
            on = parse_list(str(cpus)) & mask if not options.gpus else frozenset[int]()
        except ValueError:
            continue
        lent = [printable(str(gpu), 20) for gpu in gpus] if options.gpus else []
        if on or lent:
            found.append(holder(printable(f"job {number}", 24), uid, on, lent))
    return found


def confine(grant: dict[str, Any]) -> list[str]:
    """Make sure that this process is on the CPUs of its grant and on no other; what could not be done, as warnings."""
    cpus = parse_list(grant["cpus"])
    if grant["confinement"] == "none" or os.sched_getaffinity(0) <= cpus:
        return []
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        return [f"cannot be kept on CPUs {grant['cpus']}: {error.strerror}"]
    now = os.sched_getaffinity(0)
    return [] if now <= cpus else [f"runs on CPUs {format_list(now)} instead of {grant['cpus']}"]
