"""`dnsproxy reload`, `endpoints`, `sets`: what the daemon holds."""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import counted, show, show_value, text
from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Columns, Row


def _addresses(row: Row) -> object:
    return row["addresses"] or ("this host" if HOST_LABEL in row["labels"] else None)


def opened(rule: Row) -> str:
    """Return what a rule opens, such as `443/tcp,443/udp`."""
    if rule["kind"] == "resolve":
        return "nothing"
    ports = "every port" if rule["ports"] is None else ",".join(rule["ports"])
    sets = f"; sets {','.join(rule['sets'])}" if rule["sets"] else ""
    return ports + sets + (f"; also in {','.join(rule['cidrs'])}" if rule["cidrs"] else "")


ENDPOINTS: Columns = {
    "Endpoint": lambda row: row["endpoint-id"],
    "Restricted": lambda row: row["restricted"],
    "Names": lambda row: row["names"],
    "IPs": lambda row: row["ips"],
    "Zombies": lambda row: row["zombies"],
    "Evicted": lambda row: row["evicted"],
    "Addresses": _addresses,
}
SETS: Columns = {
    "Set": lambda row: row["set"],
    "Endpoint": lambda row: row["endpoint-id"],
    "Wanted": lambda row: row["wanted"],
    "Applied": lambda row: row["applied"],
    "Missing": lambda row: row["missing"],
    "Extra": lambda row: row["extra"],
    "Problem": lambda row: row["failing"] or _only_shown(row),
}
VERIFIED: Columns = {
    "Set": lambda row: row["set"],
    "Endpoint": lambda row: row["endpoint-id"],
    "Kernel": lambda row: row["kernel"],
    "Applied": lambda row: row["applied"],
    "Missing": lambda row: row["missing"],
    "Extra": lambda row: row["extra"],
    "Problem": lambda row: row["error"] or _examples(row["examples"]) or _only_shown(row),
}
RULES: Columns = {
    "Kind": lambda row: row["kind"],
    "Names": lambda row: row["text"],
    "Opens": opened,
    "Rule": lambda row: f"{row['policy']} {row['path']}",
    "At": lambda row: row["at"],
}
HOST_LABEL = "reserved:host"


def _only_shown(row: Row) -> str | None:
    return None if row["enforced"] else "only shown: no such set exists"


def _examples(examples: Iterable[Row]) -> str:
    return "; ".join(f"{each['problem']} {each['element']}" for each in examples)


# -- reload


@click.command()
@options.asks_daemon
def reload(admin: Admin) -> None:
    """Have settings and policies read again, and wait for it.

    With any fault everything stays as it was. Exit 0: in force, 3: faults.
    """
    admin.post("/v1/reload")
    print("in force: settings and policies as the files say now")


# -- endpoints


@click.group(cls=options.Group)
def endpoints() -> None:
    """Show who may ask, and what each has learned."""


@endpoints.command("list")
@options.output
@options.asks_daemon
def endpoints_list(admin: Admin, output: str) -> None:
    """List the endpoints."""
    show(admin.get("/v1/endpoints"), ENDPOINTS, output)


@endpoints.command("show")
@click.argument("endpoint", metavar="ENDPOINT", shell_complete=options.running_endpoints)
@options.output
@options.asks_daemon
def endpoints_show(admin: Admin, endpoint: str, output: str) -> None:
    """Show one endpoint with its rules and sets.

    \b
      dnsproxy endpoints show default/ci-runner
      dnsproxy endpoints show ci-runner
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    found = admin.get("/v1/endpoints", *_parts(admin, endpoint))
    if output != "table":
        show_value(found, output)
        return
    for key in (
        "endpoint-id",
        "addresses",
        "labels",
        "restricted",
        "deny",
        "names",
        "ips",
        "zombies",
        "evicted",
        "sets",
    ):
        told = {"labels": _labels, "addresses": _addresses}.get(key, itemgetter(key))
        print(f"{key.ljust(11)}   {text(told(found))}")
    print()
    show(_joined(found["rules"]), RULES, output)


def _joined(rules: Iterable[Row]) -> Iterator[Row]:
    """Join the two rules that one `allow` of a policy is: names may be asked for, and connected to."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    for rule in rules:
        lines.setdefault(tuple(rule[key] for key in ("policy", "path", "text", "at")), []).append(rule)
    for same in lines.values():
        both = {"resolve", "connect"} <= {rule["kind"] for rule in same}
        yield from ({**rule, "kind": "allow"} for rule in same if both and rule["kind"] == "connect")
        yield from (rule for rule in same if not both or rule["kind"] == "deny")


def _labels(row: Row) -> list[str]:
    return [f"{key}={value}" if value else key for key, value in row["labels"].items()]


def _parts(admin: Admin, endpoint: str) -> list[str]:
    """Return namespace and name; where only a name is given, that of the one endpoint which has it."""
    if "/" in endpoint:
        return endpoint.split("/", 1)
    keys: list[str] = [row["endpoint-id"] for row in admin.get("/v1/endpoints")]
    found = [key for key in keys if key.partition("/")[2] == endpoint]
    if len(found) == 1:
        return found[0].split("/", 1)
    problem = "stands for several" if found else "is unknown; there are"
    raise click.BadParameter(f"{endpoint!r} {problem}: {', '.join(found or keys)}", param_hint="ENDPOINT")


# -- sets


@click.group(cls=options.Group)
def sets() -> None:
    """Show, compare and repair the nftables sets."""


@sets.command("list")
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def sets_list(admin: Admin, endpoint: str | None, output: str) -> None:
    """List the sets: what they should hold, and what the kernel has acknowledged."""
    show(admin.get("/v1/sets", endpoint=endpoint), SETS, output)


@sets.command()
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def verify(admin: Admin, endpoint: str | None, output: str) -> int:
    """Read the sets back from the kernel and compare; nothing is changed.

    Exit 0: they are as they should be, 1: they are not.
    """
    rows = admin.get("/v1/sets/verify", endpoint=endpoint)
    show(rows, VERIFIED, output)
    return int(any(row["missing"] or row["extra"] or row["error"] for row in rows))


@sets.command()
@options.asks_daemon
def resync(admin: Admin) -> None:
    """Have the kernel's sets compared and repaired now, and wait for it."""
    done = admin.post("/v1/sets/resync")
    if not done["repaired"]:
        raise DnsproxyError(f"not repaired: {done['problem']}")
    print(f"repaired: {counted(done['drift'], 'element', 'elements')} differed")
