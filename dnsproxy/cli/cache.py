"""`dnsproxy cache`, `names`, `zombies`: what was learned, and how to forget it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import counted, moment, show, show_value

if TYPE_CHECKING:
    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Columns

LOOKUPS: Columns = {  # those of Cilium's `fqdn cache list`
    "Endpoint": lambda row: row["endpoint-id"],
    "Source": lambda row: row["source"],
    "FQDN": lambda row: row["fqdn"],
    "TTL": lambda row: row["ttl"],
    "ExpirationTime": lambda row: moment(row["expiration-time"]),
    "IPs": lambda row: row["ips"],
}
SELECTORS: Columns = {
    "Selector": lambda row: row["selector"],
    "Names": lambda row: row["names"],
    "IPs": lambda row: row["ips"],
    "Endpoints": lambda row: row["endpoints"],
}
ZOMBIES: Columns = {
    "Endpoint": lambda row: row["endpoint-id"],
    "IP": lambda row: row["ip"],
    "State": lambda row: row["state"],
    "LastAlive": lambda row: moment(row["alive-at"]),
    "Since": lambda row: moment(row["delete-pending-at"]),
    "Names": lambda row: _some(row["names"], row["names-total"]),
}
EVERYTHING = "*"


def _some(names: list[str], total: int) -> str:
    more = [f"and {total - len(names)} more"] if total > len(names) else []
    return ",".join([*names, *more])


@click.group(cls=options.Group)
def cache() -> None:
    """Show or forget the names and addresses that were learned."""


@cache.command("list")
@options.endpoint(running=True)
@options.pattern
@click.option("--cidr", metavar="CIDR", help="Names with an address in this range only.")
@click.option(
    "--source",
    "-s",
    type=click.Choice(["lookup", "connection", "global"]),
    help="Leases, addresses that live connections keep, or what all endpoints know together.",
)
@options.output
@options.asks_daemon
def list_(
    admin: Admin, endpoint: str | None, pattern: str | None, cidr: str | None, source: str | None, output: str
) -> None:
    """List names, their addresses, and until when these may be used.

    \b
      dnsproxy cache list
      dnsproxy cache list -e ci-runner -p '*.github.com'
      dnsproxy cache list -s global -o json > preload.json
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    rows = admin.get("/v1/lookups", endpoint=endpoint, matchpattern=pattern, cidr=cidr, source=source)
    show(rows, LOOKUPS, output)


@cache.command()
@options.endpoint(running=True)
@options.pattern
@click.option("--force", "-f", is_flag=True, help="Do not ask.")
@options.asks_daemon
def clean(admin: Admin, endpoint: str | None, pattern: str | None, force: bool) -> None:
    """Forget names, after showing them and asking.

    Their addresses leave the sets unless live connections use them, and are learned again when asked for.

    \b
      dnsproxy cache clean -p '*.example.com'
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    what = {"endpoint": endpoint, "matchpattern": pattern or EVERYTHING}
    if not force:
        rows = admin.delete("/v1/lookups", **what, dry_run="true")
        print("This will be forgotten:\n")
        show(rows, LOOKUPS, "table")
        click.confirm("\nForget it?", abort=True)
    gone = admin.delete("/v1/lookups", **what)
    print(f"forgotten: {counted(gone['pairs'], 'address', 'addresses')} of names")


@click.command()
@options.output
@options.asks_daemon
def names(admin: Admin, output: str) -> None:
    """List the selectors of the policies, and how many names and addresses each has matched.

    JSON and YAML have the shape of Cilium's `fqdn names`.
    """
    if output == "table":
        show(admin.get("/v1/selectors"), SELECTORS, output)
    else:
        show_value(admin.get("/v1/names"), output)


@click.command()
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def zombies(admin: Admin, endpoint: str | None, output: str) -> None:
    """List addresses whose lease is over and which live connections may still use."""
    show(admin.get("/v1/zombies", endpoint=endpoint), ZOMBIES, output)
