"""STRATO DynDNS: the host's records follow its public address, and nobody gets banned."""
