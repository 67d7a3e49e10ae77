"""Learned addresses: which name gave which address, and until when."""
