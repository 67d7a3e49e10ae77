"""`dnsproxy status`: is all well? A first screen for people; all there is for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import counted, moment, printable, show_value

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Row

SHOWN = "shown, not enforced"
FINE = {
    "enforcing": "all that names open is in the kernel's sets before an answer goes out",
    SHOWN: "sets are printed and exist nowhere, as sets.backend says; nothing is restricted or opened",
}

WORDS = FINE | {"starting": "the sets are not read back yet", "not enforcing": "see its log"}


@click.command()
@options.output
@options.asks_daemon
def status(admin: Admin, output: str) -> int:
    """Tell how the daemon is.

    The first line says whether it enforces. JSON and YAML hold everything that is counted.

    Exit 0: it enforces, or shows the sets as it was told to; 1: it does not, or a file has faults and is not
    in force.
    """
    found = admin.get("/v1/status")
    if output == "table":
        lines = list(_screen(found))
        width = max(len(word) for word, _ in lines)
        print(*(printable(f"{word.ljust(width)}   {told}") for word, told in lines), sep="\n")
    else:
        show_value(found, output)
    return 0 if found["state"] in FINE and not found["faults"] else 1


def _screen(found: Row) -> Iterator[tuple[str, str]]:
    yield "state", f"{found['state'].upper()}: {found['problem'] or WORDS[found['state']]}"
    yield from (
        ("FAULT", f"{kind} are not those in force: {fault}") for kind, fault in found["faults"].items()
    )
    yield from (("FAULT", f"set {name}: {fault}") for name, fault in found["sets"]["failing"].items())
    yield "process", f"{found['pid']}, version {found['version']}, since {moment(found['started-at'])}"
    yield "listening", ", ".join(found["listen"]) or "not yet"
    yield "upstreams", ", ".join(map(_upstream, found["upstreams"])) or "none: a zone file"
    yield "connections", _connections(found["conntrack"])
    yield "store", _store(found["store"])
    yield (
        "reload",
        f"{'succeeded' if found['reload']['succeeded'] else 'FAILED'} {moment(found['reload']['at'])}",
    )
    yield "learned", _learned(found)
    yield "sets", _sets(found["sets"])
    yield (
        "queries",
        _nonzero(found["queries"], first=("queries", "denied", "answers"))
        + (f", {found['in-flight']} in flight"),
    )
    yield (
        "held",
        _nonzero(found["sets"], first=("holds", "released", "timeouts", "refused"), others=("waiting",)),
    )
    yield "events", "recorded" if found["events"]["recording"] else "not recorded"


def _upstream(server: Row) -> str:
    if server["usable"]:
        return f"{server['server']} ok"
    return f"{server['server']} FAILING ({counted(server['failures'], 'failure', 'failures')})"


def _connections(found: Row) -> str:
    if not found["observing"]:
        return (
            f"NOT OBSERVED ({found['problem'] or 'not looked at yet'}): zombies stay zombies.unobserved long"
        )
    if not found["completed"]:
        return "not looked at yet"
    trouble = f"; PROBLEM: {found['problem']}" if found["problem"] else ""
    return (
        f"observed: {found['entries']} in {found['seconds']:.2g} s, last look {moment(found['started-at'])}, "
        f"next {moment(found['next-at']) or 'soon'}{trouble}"
    )


def _store(found: Row | None) -> str:
    if found is None:
        return "none: what is learned ends with the process"
    if found["problem"]:
        return f"FAILING: {found['problem']}"
    return "not written yet" if found["age"] is None else f"written {found['age']:.0f} s ago"


def _learned(found: Row) -> str:
    parts = {
        "endpoints": "endpoint",
        "selectors": "selector",
        "names": "name",
        "ips": "address",
        "zombies": "zombie",
    }
    many = {"ips": "addresses"}
    return ", ".join(counted(found[key], one, many.get(key, key)) for key, one in parts.items())


def _sets(found: Row) -> str:
    word = "shown" if found["state"] == SHOWN else "applied"
    told = [f"{counted(found['applied'], 'element', 'elements')} {word}"]
    told += [f"{found['queued']} queued"] if found["queued"] else []
    told += [f"{found['doubted']} IN DOUBT"] if found["doubted"] else []
    return ", ".join(told) + "; " + _nonzero(found, first=("repairs",), others=("drift", "failures", "cut"))


def _nonzero(found: Row, *, first: tuple[str, ...], others: tuple[str, ...] | None = None) -> str:
    """Return numbers as words: the first ones always, the others if they are not zero."""
    rest = [key for key in (found if others is None else others) if key not in first and found.get(key)]
    return ", ".join(f"{found[key]} {key}" for key in (*first, *rest))
