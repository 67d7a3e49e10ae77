"""`dnsproxy doctor`: what keeps it from working here, one line for each thing looked at."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import printable, show_value

if TYPE_CHECKING:
    from pathlib import Path

    from dnsproxy.cli.checks import Finding

WORDS = {"ok": "ok", "warn": "warn", "fail": "FAIL"}


@click.command()
@click.option("--netns", metavar="NAME", help="A client's network namespace, as `ip netns` names it.")
@click.option("--pid", metavar="PID", type=int, help="A client's process, such as a container's first one.")
@options.socket
@options.config
@options.output
def doctor(netns: str | None, pid: int | None, socket: Path | None, config: Path, output: str) -> int:
    """Look for what keeps it from working here: settings, rights, ports, kernel, rules, clients, upstreams.

    \b
      dnsproxy doctor
      dnsproxy doctor --netns ci
      dnsproxy doctor --pid $(docker inspect -f '{{.State.Pid}}' ci)

    Asks the upstream servers one harmless question each, and changes nothing. Exit 0: nothing failed,
    1: something did.
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    from dnsproxy.cli import checks, client, probes  # noqa: PLC0415

    if netns is not None and pid is not None:
        raise click.UsageError("--netns and --pid both name the client: give one of them")
    case = checks.Case(config, partial(client.connect, socket, config), probes.client(netns, pid))
    rows = []
    for check, finding in checks.examine(case):
        rows.append({"check": check, **finding._asdict()})
        if output == "table":
            _line(check, finding)
    if output != "table":
        show_value(rows, output)
    return int(any(row["result"] == checks.FAIL for row in rows))


def _line(check: str, finding: Finding) -> None:
    print(f"{WORDS[finding.result]:4}   {check:9}   {printable(finding.message)}", flush=True)
    if finding.hint:
        print(f"{'':19}{printable(finding.hint)}", flush=True)
