"""What commands read."""

from __future__ import annotations

from pathlib import Path

from dnsproxy.cli import inputs
from dnsproxy.config import Config, SocketAddress


def test_settings_and_texts_become_endpoints_and_a_policy(folder):
    settings = inputs.settings(folder / "dnsproxy.yaml")
    texts = inputs.texts([settings.policy.directory])
    assert [Path(file).name for file, _ in texts] == ["ci.yaml"]
    table, policy = inputs.load(texts, settings)
    assert [each.key for each in table.endpoints if policy.restricts(each)] == ["build/ci-runner"]


def test_local_addresses_matter_to_listeners_on_every_address_only():
    assert inputs.local_addresses(Config()) == frozenset()
    everywhere = Config().model_copy(update={"listen": [SocketAddress("0.0.0.0", 53)]})
    assert bytes((127, 0, 0, 1)) in inputs.local_addresses(everywhere)
