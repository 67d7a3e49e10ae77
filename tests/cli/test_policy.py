"""`dnsproxy policy trace`."""

from __future__ import annotations

import pytest


def trace(dnsproxy, folder, *arguments):
    return dnsproxy("policy", "trace", "--config", folder / "dnsproxy.yaml", *arguments)


@pytest.mark.parametrize(
    "endpoint", ["ci-runner", "build/ci-runner", "10.1.0.5", "fd00::77", "::ffff:10.1.0.5"]
)
def test_an_allowed_name_comes_with_its_rule_and_what_it_opens(dnsproxy, folder, endpoint):
    code, out, err = trace(dnsproxy, folder, "--endpoint", endpoint, "GitHub.com.", "--type", "aaaa")
    assert (code, err) == (0, "")
    file = f"{folder}/policies.d/ci.yaml"
    assert out.splitlines() == [
        "allowed: github.com. AAAA for build/ci-runner",
        "  because a rule allows this name",
        f"  rule    {file}:12: EgressPolicy build/ci: spec.allow[0]: github.com",
        f"  opens   443/tcp; public addresses only  ({file}:12)",
    ]


@pytest.mark.parametrize(
    ("name", "opens"),
    [
        (
            "x.pypi.example",
            "22/tcp,80-82/tcp,443/tcp,443/udp; sets pypi, 4#inet#fw4#py; also private addresses in 10.",
        ),
        ("any.example", "every port; public addresses only  ("),
        ("x.corp.example", "nothing: it may be asked for, not connected to"),
    ],
)
def test_what_a_name_opens(dnsproxy, folder, name, opens):
    code, out, _ = trace(dnsproxy, folder, "-e", "ci-runner", name)
    assert code == 0
    assert out.splitlines()[-1].startswith(f"  opens   {opens}")


def test_a_denied_name_ends_with_one(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "ci-runner", "evil.example")
    assert code == 1
    assert out.splitlines() == [
        "denied: evil.example. A for build/ci-runner",
        "  because no rule allows this name",
    ]


def test_an_endpoint_that_no_policy_selects_is_not_restricted(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "host", "evil.example")
    assert code == 0
    assert out.splitlines()[1:] == [
        "  because no policy selects this endpoint",
        "  opens   everything: its connections are not restricted",
    ]


def test_the_hosts_own_addresses_are_the_host(dnsproxy, folder):
    code, out, _ = trace(dnsproxy, folder, "-e", "127.0.0.1", "evil.example")
    assert (code, out.splitlines()[0]) == (0, "allowed: evil.example. A for default/host")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-e", "ci", "x.example"), "'ci' is unknown; there are: build/ci-runner, default/host"),
        (("-e", "host", "a..example"), "'a..example' has an empty label"),
        (("-e", "host", "https://x.example/y"), "is a URL: write the name alone, x.example"),
        (("-e", "host", "x.example:443"), "is a name and a port: write the name alone, x.example"),
        (("-e", "host", "192.0.2.1"), "'192.0.2.1' is an address, not a name"),
        (("-e", "host", "2001:db8::1"), "'2001:db8::1' is an address, not a name"),
        (("-e", "host", "x.example", "--type", "AAAAA"), "'AAAAA' is not a type, such as A, AAAA"),
        (("x.example",), "--endpoint"),
    ],
)
def test_wrong_usage_of_trace_ends_with_two(dnsproxy, folder, arguments, message):
    code, out, err = trace(dnsproxy, folder, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())


def test_a_name_that_two_namespaces_have_is_asked_back(dnsproxy, folder, write):
    write(
        folder,
        "policies.d/other.yaml",
        """
        apiVersion: dnsproxy/v1
        kind: Endpoint
        metadata: {name: ci-runner, namespace: test}
        spec: {addresses: [10.9.0.5]}
        """,
    )
    code, _, err = trace(dnsproxy, folder, "-e", "ci-runner", "github.com")
    assert code == 2
    assert "stands for several: build/ci-runner, test/ci-runner" in " ".join(err.split())


def test_trace_with_faulty_documents_ends_with_three(dnsproxy, folder, write):
    write(folder, "policies.d/a.yaml", "kind: 5\n")
    code, out, err = trace(dnsproxy, folder, "-e", "host", "x.example")
    assert (code, out) == (3, "")
    assert err.startswith(f"{folder}/policies.d/a.yaml:1:")


@pytest.mark.parametrize("address", ["203.0.113.9", "2001:db8::9"])
def test_a_strangers_address_is_refused_and_that_is_no_wrong_usage(dnsproxy, folder, address):
    code, out, err = trace(dnsproxy, folder, "-e", address, "github.com")
    assert (code, err) == (1, "")
    assert out.splitlines() == [
        f"refused: github.com. A for {address}",
        "  because no endpoint has this address, and an unknown client is answered REFUSED",
    ]
