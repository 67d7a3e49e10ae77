"""`dnsproxy template`: nftables rules that use the sets, made from settings and documents."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from dnsproxy.cli import inputs, options

if TYPE_CHECKING:
    from pathlib import Path

    from dnsproxy.config import Config
    from dnsproxy.endpoints import EndpointTable


@click.group(cls=options.Group)
def template() -> None:
    """Print nftables rules that use the sets.

    They are made from the settings, the Endpoint documents, and which endpoints a policy selects.

    \b
      dnsproxy template forward > forward.nft
      nft -f forward.nft
    """  # noqa: D301 - \b is click's sign not to wrap what follows


@template.command()
@options.config
def forward(config: Path) -> None:
    """For a router or container host: what it forwards from the endpoints."""
    from dnsproxy.namemanager import template as made  # noqa: PLC0415

    settings, table, governed = _inputs(config)
    print(made.forward(table, governed, table=settings.sets.table), end="")


@template.command()
@options.config
def output(config: Path) -> None:
    """For this host itself: what its own programs connect to (the endpoint `host`)."""
    from dnsproxy.namemanager import template as made  # noqa: PLC0415

    settings, table, governed = _inputs(config)
    print(made.output(table, governed, table=settings.sets.table, mark=settings.upstream.mark), end="")


@template.command()
@options.config
def redirect(config: Path) -> None:
    """For both: all DNS of the endpoints and of this host comes to the proxy."""
    from dnsproxy.namemanager import template as made  # noqa: PLC0415

    settings, table, _ = _inputs(config)
    port = settings.listen[0].port
    print(made.redirect(table, port=port, table=settings.sets.table, mark=settings.upstream.mark), end="")
    for nobody in made.uncovered(table, settings.listen, port):
        print(f"dnsproxy: warning: {nobody}", file=sys.stderr)


def _inputs(config: Path) -> tuple[Config, EndpointTable, frozenset[str]]:
    """Return the settings, the endpoints, and the keys of those that a policy restricts."""
    settings = inputs.settings(config)
    table, policy = inputs.load(inputs.texts([settings.policy.directory]), settings)
    return settings, table, frozenset(each.key for each in table.endpoints if policy.restricts(each))
