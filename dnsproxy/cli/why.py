"""`dnsproxy why`: what keeps an address open, or why it is not and until when it was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import moment, printable, show_value
from dnsproxy.cli.state import opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Row


@click.command()
@click.argument("address", metavar="ADDRESS")
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def why(admin: Admin, address: str, endpoint: str | None, output: str) -> None:
    """Tell which names, rules, leases and connections keep an address open, or why it is not.

    A name is shown by `dnsproxy cache list -p NAME`.

    \b
      dnsproxy why 192.0.2.1
      dnsproxy why 2001:db8::1 --endpoint ci-runner
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    found = admin.get("/v1/why", address, endpoint=endpoint)
    if output == "table":
        print(*map(printable, _told(found)), sep="\n")
    else:
        show_value(found, output)


def _told(found: Row) -> Iterator[str]:
    yield found["address"]
    if not found["endpoints"]:
        yield "  no endpoint knows it: nobody asked for a name with this address, or it is long forgotten"
    for endpoint in found["endpoints"]:
        yield f"  {endpoint['endpoint-id']}: {endpoint['reason']}"
        yield from (f"    {line}" for line in _of_endpoint(endpoint))
    if found["shared"]:
        yield "  in sets that rules name, for everybody:"
        yield from (f"    {line}" for line in _elements(found["shared"]))
    if found["global"]:
        yield f"  known to all endpoints together as {', '.join(found['global'])}"


def _of_endpoint(endpoint: Row) -> Iterator[str]:
    for lookup in endpoint["lookups"]:
        over = ", which is over" if lookup["expired"] else ""
        yield (
            f"name     {lookup['fqdn']}  lease until {moment(lookup['expiration-time'])}{over}"
            f"  (TTL {lookup['ttl']}, seen {moment(lookup['lookup-time'])})"
        )
        yield from map(_rule, lookup["rules"])
    if (more := endpoint["lookups-total"] - len(endpoint["lookups"])) > 0:
        yield f"         and {more} more names"
    if endpoint["zombie"]:
        yield from _zombie(endpoint["zombie"])
    yield from _elements(endpoint["elements"])
    if endpoint["not-learned"]:
        seen = endpoint["not-learned"]
        yield f"answered {moment(seen['at'])} for {seen['fqdn']}: not learned, since it is a private address"
    if endpoint["departed"]:
        gone = endpoint["departed"]
        yield f"left     {moment(gone['at'])} as {', '.join(gone['names'])}: {gone['cause']}"


def _rule(rule: Row) -> str:
    return f"  rule   {rule['at']}: {rule['policy']}: {rule['path']}: {rule['text']}: opens {opened(rule)}"


def _zombie(zombie: Row) -> Iterator[str]:
    now = "a connection uses it" if zombie["state"] == "live" else f"it is {zombie['state']}"
    over, alive = moment(zombie["delete-pending-at"]), moment(zombie["alive-at"])
    until = moment(zombie["expiration-time"])
    if zombie["state"] == "unobserved":
        yield f"zombie   lease over at {over}; connections cannot be seen here: it stays until {until}"
    else:
        yield f"zombie   lease over at {over}, last alive {alive}: {now}; next look {until or 'soon'}"
    yield f"         kept as {', '.join(zombie['names'])}"


def _elements(elements: Iterable[Row]) -> Iterator[str]:
    for element in elements:
        yield f"element  {element['set']}  {element['element']}  ({element['name']})"
