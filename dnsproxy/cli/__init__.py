"""The command line: arguments -> one call. It starts at `main`."""

from dnsproxy.cli.root import main

__all__ = ["main"]
