"""`dnsproxy template`."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("name", ["forward", "output", "redirect"])
def test_a_template_is_made_from_settings_and_documents(dnsproxy, folder, name, write):
    write(
        folder,
        "dnsproxy.yaml",
        "listen: ['0.0.0.0:5300', '[::]:5300']\nsets: {table: inet mine}\nupstream: {mark: 99}\n",
    )
    code, out, err = dnsproxy("template", name, "--config", folder / "dnsproxy.yaml")
    assert (code, err) == (0, "")
    assert out.startswith("#!/usr/sbin/nft -f\n")
    assert "table inet mine {" in out
    expected = {
        "forward": "@ep.build.ci-runner.port4",
        "output": "meta mark 99",
        "redirect": "redirect to :5300",
    }
    assert expected[name] in out


def test_endpoints_that_no_policy_restricts_pass_the_forward_template(dnsproxy, folder, write):
    write(
        folder,
        "policies.d/free.yaml",
        """
        apiVersion: dnsproxy/v1
        kind: Endpoint
        metadata: {name: free}
        spec: {addresses: [10.9.0.5]}
        """,
    )
    _, out, _ = dnsproxy("template", "forward", "--config", folder / "dnsproxy.yaml")
    assert "@ep.build.ci-runner.addr4" in out
    assert "@ep.default.free.addr4" not in out


def test_a_template_that_cannot_be_is_one_message(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53], mark: 0}\n")
    code, out, err = dnsproxy("template", "redirect", "--config", folder / "dnsproxy.yaml")
    assert (code, out) == (1, "")
    assert err.startswith("dnsproxy: redirecting DNS takes a mark")


def test_a_redirect_to_where_nobody_listens_is_warned_of_beside_the_rules(dnsproxy, folder, write):
    write(folder, "dnsproxy.yaml", "upstream: {servers: [192.0.2.53]}\n")
    code, out, err = dnsproxy("template", "redirect", "--config", folder / "dnsproxy.yaml")
    assert (code, out[:2]) == (0, "#!")
    assert err.splitlines() == [
        f"dnsproxy: warning: queries of endpoints over {family} are redirected to port 53 of here: "
        f"nobody answers there; listen on {everywhere}:53"
        for family, everywhere in (("IPv4", "0.0.0.0"), ("IPv6", "[::]"))
    ]
