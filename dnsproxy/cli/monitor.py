"""`dnsproxy monitor`: who asks for what, and what comes of it, live."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import moment, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Row


@click.command()
@options.endpoint(running=True)
@click.option("--name", "-n", metavar="PATTERN", help="These names only, such as '*.example.com'.")
@click.option("--verdict", type=click.Choice(["allowed", "denied", "failed"]), help="These only.")
@click.option("--output", "-o", type=click.Choice(["text", "json", "yaml"]), default="text",
              show_default=True, help="Lines for people, the JSON of the query log, or YAML.")  # fmt: skip
@options.asks_daemon
def monitor(admin: Admin, endpoint: str | None, name: str | None, verdict: str | None, output: str) -> None:
    """Show who asks for what, and what comes of it, live, until Ctrl-C.

    \b
      dnsproxy monitor
      dnsproxy monitor -e ci-runner --verdict denied
      dnsproxy monitor -n '**.example.com' -o json
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    renderers: dict[str, Callable[[Row], str]] = {"text": human, "json": json.dumps, "yaml": document}
    render = renderers[output]
    with suppress(KeyboardInterrupt):
        for event in admin.lines("/v1/events", endpoint=endpoint, name=name, verdict=verdict):
            print(render(event), flush=True)
            if getattr(sys.stdout, "gone", False):
                break


def document(event: Row) -> str:
    """Return an event as a YAML document."""
    import yaml  # noqa: PLC0415

    dumped = yaml.dump(
        event, Dumper=yaml.CSafeDumper, sort_keys=False, allow_unicode=True, width=1000, explicit_start=True
    )
    return str(dumped).rstrip("\n")


def human(event: Row) -> str:
    """Return an event as one line, its words in the order of Cilium's monitor."""
    told = {"request": _request, "response": _response, "dropped": _dropped}[event["type"]](event)
    return printable(f"{(moment(event['ts']) or '')[11:23]} {told}")


def _request(event: Row) -> str:
    because = f" ({event['reason']})" if event["verdict"] == "denied" else ""
    return (
        f"-> Request dns from {_who(event)} verdict {event['verdict'].capitalize()}{because}"
        f" DNS proxy: {event['name'] or '-'} {event['qtype']}"
    )


def _response(event: Row) -> str:
    told = [f"<- Response dns to {_who(event)}"]
    told += [f"from {event['server']}"] if event["server"] else []
    told += [f"verdict Error ({event['cause']})" if event["cause"] else "verdict Forwarded"]
    told += [f"DNS proxy: {event['name']} {event['qtype']}"]
    told += [f"RCode: {event['rcode']}"] if event["rcode"] != "NOERROR" else []
    told += [f"TTL: {event['ttl']}"] if event["ttl"] is not None else []
    told += [f"Answer: '{','.join(event['addresses'])}'"] if event["addresses"] else []
    told += [f"CNAMEs: {','.join(event['cnames'])}"] if event["cnames"] else []
    told += [f"not learned: {','.join(event['not_learned'])}"] if event["not_learned"] else []
    return " ".join([*told, f"({event['upstream_ms']:.1f} ms, held {event['hold_ms']:.1f} ms)"])


def _who(event: Row) -> str:
    return f"{event['endpoint'] or 'unknown'} ({event['client']} {event['protocol']})"


def _dropped(event: Row) -> str:
    return f"-- {event['count']} events are missing here: they came faster than they were read"
