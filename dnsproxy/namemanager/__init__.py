"""Learned addresses become elements of nftables sets, and stay exactly what the caches say."""
