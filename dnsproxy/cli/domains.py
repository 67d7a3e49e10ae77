"""`dnsproxy domains` and `dyndns`: the DynDNS records."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import show, show_value, text

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Columns, Row


def _of(section: str, key: str) -> Callable[[Row], object]:
    return lambda row: row[section].get(key)


LIST: Columns = {  # the printer columns of the original
    "Fqdn": _of("spec", "fqdn"),
    "IP Address": _of("status", "ipAddress"),
    "Mode": _of("status", "mode"),
    "Successful": _of("status", "lastResult"),
    "Last Run": _of("status", "lastLoop"),
    "Enabled": _of("spec", "enabled"),
}
WIDE: Columns = {
    **LIST,
    "IPv6": _of("status", "ipv6"),
    "Phase": _of("status", "phase"),
    "Last Change": _of("status", "lastChange"),
    "Next Run": _of("status", "nextRun"),
    "Message": _of("status", "message"),
}


@click.group(cls=options.Group)
def domains() -> None:
    """Show the DynDNS records that the daemon keeps, and have them sent."""


@domains.command("list")
@click.option(
    "--output",
    "-o",
    type=click.Choice(["table", "wide", "json", "yaml"]),
    default="table",
    show_default=True,
    help="How to print it.",
)
@options.asks_daemon
def domains_list(admin: Admin, output: str) -> None:
    """List the records."""
    columns = WIDE if output == "wide" else LIST
    show(admin.get("/v1/domains"), columns, "table" if output == "wide" else output)


@domains.command("show")
@click.argument("fqdn")
@options.output
@options.asks_daemon
def domains_show(admin: Admin, fqdn: str, output: str) -> None:
    """Show one record with its status and its last events."""
    found = admin.get("/v1/domains", fqdn)
    if output != "table":
        show_value(found, output)
        return
    lines = {**found["metadata"], **found["spec"], **found["status"]}
    width = max(map(len, lines))
    print(*(f"{key.ljust(width)}  {text(value)}" for key, value in lines.items()), sep="\n")
    for event in found["events"]:
        print(f"{event['at']}  {event['type']}  {event['reason']}: {text(event['message'])}")


@domains.command("force")
@click.argument("fqdn")
@options.asks_daemon
def domains_force(admin: Admin, fqdn: str) -> None:
    """Have a record sent once though nothing differs; at most once an hour."""
    admin.post("/v1/domains", fqdn, "force")
    print(f"{fqdn}: is sent as soon as the last request is five minutes ago")


@domains.command("resume")
@click.argument("fqdn")
@options.asks_daemon
def domains_resume(admin: Admin, fqdn: str) -> None:
    """End the halt of a record, once what the provider complained about is mended."""
    admin.post("/v1/domains", fqdn, "resume")
    print(f"{fqdn}: is looked at again")


@click.command()
@options.config
def dyndns(config: Path) -> int:
    """Keep the DynDNS records alone, without the proxy, until stopped.

    `dnsproxy run` keeps them as well; one of the two is enough.
    """
    from dnsproxy import domains as alone  # noqa: PLC0415
    from dnsproxy.cli import inputs  # noqa: PLC0415

    return alone.run(inputs.settings(config))
