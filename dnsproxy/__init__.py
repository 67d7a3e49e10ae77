"""An asyncio DNS proxy that enforces names and opens nftables sets before an answer is released."""

__version__ = "0.1.0"
