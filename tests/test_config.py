"""Settings: what a text means, what is refused and in which words, and that the sample agrees."""

from __future__ import annotations

from ipaddress import ip_network
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from dnsproxy import addresses
from dnsproxy.config import (
    Config,
    SocketAddress,
    TableName,
    check_loops,
    loops,
    read,
    resolv_conf,
    socket_address,
    upstreams_of,
)
from dnsproxy.errors import DocumentError

TREE = Path(__file__).parent.parent
SAMPLE = TREE / "config" / "dnsproxy.yaml"
FILE = "/etc/dnsproxy/dnsproxy.yaml"


def settings(text: str) -> Config:
    return read(dedent(text), FILE)


def complaints(text: str) -> list[str]:
    """Return the messages that a text gives, without the file they all begin with."""
    with pytest.raises(DocumentError) as caught:
        settings(text)
    return [str(problem).removeprefix(f"{FILE}:") for problem in caught.value.problems]


def keys(model: type[BaseModel], before: str = "") -> dict[str, object]:
    """Return every setting by its dotted key, with its default."""
    found: dict[str, object] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            found |= keys(type(default), f"{before}{name}.")
        else:
            found[before + name] = default
    return found


def flattened(values: dict, before: str = "") -> set[str]:
    known = keys(Config)
    found: set[str] = set()
    for name, value in values.items():
        here = before + name
        found |= {here} if here in known or not isinstance(value, dict) else flattened(value, f"{here}.")
    return found


# -- the sample and the manual --------------------------------------------------------------------------


def test_the_sample_file_has_every_key_and_its_default():
    sample = read(SAMPLE.read_text(), FILE)
    assert sample.model_dump() == settings("listen: ['127.0.0.1:53', '[::1]:53']").model_dump()
    assert flattened(yaml.safe_load(SAMPLE.read_text())) == set(keys(Config))


def test_every_key_of_the_sample_says_why():
    """Each key, or the first of a pair, has a comment right above it."""
    lines = SAMPLE.read_text().splitlines()
    pairs = {"queries_per_client", "tcp_connections_per_client"}
    for number, line in enumerate(lines):
        key = line.strip().partition(":")[0]
        is_section = line.endswith(":") and not line.startswith(" ")
        if line.strip().startswith("#") or ":" not in line or is_section or key in pairs:
            continue
        assert lines[number - 1].strip().startswith("#"), line


@pytest.mark.parametrize("key", keys(Config))
def test_every_setting_has_a_heading_in_the_manual(key):
    manual = (TREE / "docs" / "configuration.md").read_text().splitlines()
    assert any(line.startswith("#") and f"`{key}`" in line for line in manual)


def test_the_manual_has_no_heading_for_a_setting_that_is_none():
    manual = (TREE / "docs" / "configuration.md").read_text().splitlines()
    named = {part for line in manual if line.startswith("### ") for part in line.split("`")[1::2]}
    assert named == set(keys(Config))


# -- what a text means ----------------------------------------------------------------------------------


def test_an_empty_text_means_the_defaults():
    assert read("", FILE).model_dump() == settings("listen: ['127.0.0.1:53', '[::1]:53']").model_dump()
    assert read("# only a comment\n", FILE).sets.hold == 0.1


def test_values_are_plain_and_canonical():
    config = settings(
        """
        listen: ["0.0.0.0:53", "[2001:DB8:0::1]:5353"]
        upstream:
          servers: [192.0.2.1, "2001:db8::2", "::ffff:192.0.2.3"]
          routes: {Corp.example: ["10.0.0.53:54"]}
        policy: {private: [10.0.0.0/8, "fd00::/8"]}
        sets: {table: ip6 my-table_2, hold: 1}
        """
    )
    assert config.listen == [SocketAddress("0.0.0.0", 53), SocketAddress("2001:db8::1", 5353)]
    assert list(map(str, config.upstream.servers)) == ["192.0.2.1:53", "[2001:db8::2]:53", "192.0.2.3:53"]
    assert config.upstream.routes == {"Corp.example": [SocketAddress("10.0.0.53", 54)]}
    assert config.policy.private == [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]
    assert config.sets.table == TableName("ip6", "my-table_2")
    assert config.sets.hold == 1.0


def test_relative_paths_belong_to_the_folder_of_the_settings():
    config = settings(
        "upstream: {zone: demo.zone}\nevents: {file: ../log/events.jsonl}\npolicy: {directory: /srv/p}"
    )
    assert config.upstream.zone == Path("/etc/dnsproxy/demo.zone")
    assert config.events.file == Path("/etc/dnsproxy/../log/events.jsonl")
    assert config.policy.directory == Path("/srv/p")
    assert config.upstream.resolv_conf == Path("/etc/resolv.conf")
    assert settings("events: {file: '-'}").events.file == Path("-")


@given(
    st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).filter(
        lambda ip: getattr(ip, "scope_id", None) is None
    ),
    st.integers(1, 65535),
)
def test_an_address_survives_its_text(address, port):
    place = SocketAddress(addresses.to_text(addresses.unmapped(address.packed)), port)
    assert socket_address(str(place)) == place
    assert socket_address(place.address) == SocketAddress(place.address, 53)


@pytest.mark.parametrize(
    "text",
    ["", "localhost", "192.0.2.1:", "192.0.2.1:0", "192.0.2.1:65536", "192.0.2.1:५३", "192.0.2.1:+53", "[::1",
     "[::1]53x", "[::1]:", "::1:x", "192.0.2", "192.0.2.1:53:53", "fe80::1%eth0", "[fe80::1%eth0]:53"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_the_text_in_the_message(text):
    with pytest.raises(ValueError) as caught:
        socket_address(text)
    assert str(caught.value).startswith(repr(text))


# -- what is refused ------------------------------------------------------------------------------------

REFUSED = [
    ("listens: [127.0.0.1:53]", "1:1: listens: unknown key 'listens': did you mean 'listen'?"),
    (
        "cache: {minimal_ttl: 5}",
        "1:9: cache.minimal_ttl: unknown key 'minimal_ttl': did you mean 'minimum_ttl'?",
    ),
    ("listen: [53]", "1:10: listen[0]: expected an address and a port, as text"),
    (
        "upstream:\n  servers: [dns.example]",
        "2:13: upstream.servers[0]: 'dns.example' is not an IP address with an optional port, such as",
    ),
    (
        "upstream: {servers: ['::']}",
        "1:22: upstream.servers[0]: '::' means every address of this host, which is no server to ask",
    ),
    (
        "upstream: {routes: {Corp.example: [10.0.0.1], corp.example.: [10.0.0.2]}}",
        "1:20: upstream.routes: two are for one domain (case and a final dot make no difference)",
    ),
    (
        "upstream: {zone: z, servers: [192.0.2.1]}",
        "1:18: upstream.zone: answers instead of real servers: leave it out, or `servers` and `routes`",
    ),
    (
        "upstream: {resolv_conf: null}",
        "1:25: upstream.resolv_conf: nobody is left to ask: set `servers`, or `zone`, or this",
    ),
    ("upstream: {attempt: 9}", "1:21: upstream.attempt: 9 s do not fit into the `timeout` of 4 s"),
    ("upstream: {mark: '53'}", "1:18: upstream.mark: expected a whole number, found text"),
    ("policy: {deny: servfail}", "1:16: policy.deny: expected 'nxdomain' or 'refused'"),
    (
        "policy: {directory: ''}",
        "1:21: policy.directory: an empty path; expected the path of a file or directory",
    ),
    (
        "policy: {private: [10.1.0.0/8]}",
        "1:20: policy.private[0]: '10.1.0.0/8' has bits set beyond its length; write 10.0.0.0/8",
    ),
    (
        "policy: {private: [corp]}",
        "1:20: policy.private[0]: 'corp' is not an address range, such as 10.0.0.0/8 or fd00::/8",
    ),
    (
        "sets: {table: dnsproxy}",
        "1:15: sets.table: 'dnsproxy' is not a table as FAMILY NAME, such as 'inet dnsproxy' (inet, ip",
    ),
    ("sets: {table: inet a;b}", "1:15: sets.table: 'inet a;b' is not a table as FAMILY NAME, such as"),
    ("sets: {hold: -1}", "1:14: sets.hold: expected 0 or more"),
    ("cache:", "1:7: cache: expected a mapping, found nothing"),
    ("log: {level: verbose}", "1:14: log.level: expected 'debug', 'info', 'warning' or 'error'"),
    ("log: {level: info}\n---\nlog: {level: info}", "3:1: a second document; settings are one document"),
    ("[]", "1:1: expected a mapping, found a list"),
]


@pytest.mark.parametrize(("text", "message"), REFUSED, ids=[text for text, _ in REFUSED])
def test_a_fault_is_named_with_place_and_expectation(text, message):
    (found,) = complaints(text)
    assert found.startswith(message)


def test_all_faults_are_named_at_once():
    found = complaints("listen: []\ncache: {minimum_ttl: soon}\nlog: {format: xml}")
    assert [line.partition(": ")[2].partition(":")[0] for line in found] == [
        "listen",
        "cache.minimum_ttl",
        "log.format",
    ]


KEYS = st.sampled_from(sorted({part for key in keys(Config) for part in key.split(".")}))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)


@given(
    st.recursive(
        SCALARS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
        max_leaves=12,
    )
)
def test_any_value_is_settings_or_a_document_error(value):
    text = yaml.safe_dump(value, allow_unicode=True)
    try:
        config = read(text, FILE)
    except DocumentError as error:
        config = error.problems or None
    assert config is not None


# -- ourselves as upstream ------------------------------------------------------------------------------

LOCAL = frozenset(map(addresses.from_text, ("127.0.0.1", "::1", "192.0.2.9", "2001:db8::9")))


@pytest.mark.parametrize(
    ("listener", "server", "loop"),
    [
        ("127.0.0.1:53", "127.0.0.1:53", True),
        ("127.0.0.1:53", "::ffff:127.0.0.1", True),
        ("127.0.0.1:53", "127.0.0.1:5300", False),
        ("127.0.0.1:53", "127.0.0.53:53", False),
        ("[::1]:53", "127.0.0.1:53", False),
        ("0.0.0.0:53", "192.0.2.9:53", True),
        ("0.0.0.0:53", "127.0.0.53:53", True),
        ("0.0.0.0:53", "192.0.2.10:53", False),
        ("0.0.0.0:53", "2001:db8::9", False),
        ("[::]:53", "::1", True),
        ("[::]:53", "192.0.2.9:53", False),
        ("[::]:53", "127.0.0.53:53", False),
        ("[::]:53", "2001:db8::9", True),
        ("[::]:53", "[2001:db8::9]:54", False),
    ],
)
def test_a_server_that_is_a_listener_of_ours(listener, server, loop):
    place = socket_address(server)
    assert loops([socket_address(listener)], [place], LOCAL) == ([place] if loop else [])


def test_a_loop_in_the_settings_is_an_error_at_its_place():
    config = settings(
        """
        listen: ["0.0.0.0:53"]
        upstream:
          servers: [192.0.2.53, 192.0.2.9]
          routes:
            corp.example: ["127.0.0.1:53", "127.0.0.1:5300"]
        """
    )
    with pytest.raises(DocumentError) as caught:
        check_loops(config, LOCAL)
    first, second = map(str, caught.value.problems)
    assert first.startswith(
        f"{FILE}:4:25: upstream.servers[1]: 192.0.2.9:53 is this proxy itself (see `listen`)"
    )
    assert second.startswith(
        f'{FILE}:6:20: upstream.routes["corp.example"][0]: 127.0.0.1:53 is this proxy itself'
    )


@pytest.mark.parametrize(
    "text",
    [
        "upstream: {servers: [192.0.2.53]}",
        "{listen: ['[::]:53'], upstream: {servers: [127.0.0.53]}}",  # our sockets of IPv6 take IPv6 alone
    ],
)
def test_settings_without_a_loop_pass(text):
    assert check_loops(settings(text), LOCAL) is None


# -- resolv.conf ----------------------------------------------------------------------------------------


def test_the_servers_of_a_resolv_conf_in_their_order_and_what_is_left_out():
    text = dedent(
        """
        # made by hand
        ; nameserver 198.51.100.1
        search corp.example
        nameserver 192.0.2.1
        nameserver\t2001:db8::1   # a comment
        options edns0 trust-ad
        nameserver 127.0.0.1
        nameserver 192.0.2.1
        nameserver fe80::1%eth0
        nameserver 192.0.2.2:5353
        nameserver
        nameserver 192.0.2.3
        nameserver 192.0.2.4
        """
    )
    servers, notes = resolv_conf(text, "/etc/resolv.conf", [SocketAddress("127.0.0.1", 53)], LOCAL)
    assert list(map(str, servers)) == ["192.0.2.1:53", "[2001:db8::1]:53", "192.0.2.3:53", "192.0.2.4:53"]
    assert list(map(str, notes)) == [
        "/etc/resolv.conf:8:1: left out: 127.0.0.1:53 is this proxy itself",
        "/etc/resolv.conf:10:1: left out: 'nameserver fe80::1%eth0' names no address we can ask",
        "/etc/resolv.conf:11:1: left out: 'nameserver 192.0.2.2:5353' names no address we can ask",
        "/etc/resolv.conf:12:1: left out: 'nameserver' names no address we can ask",
    ]


NOBODY = "resolv.conf names no server but ourselves; set `upstream.servers` to the servers to ask"
OURSELVES = "nameserver 127.0.0.1\nnameserver nobody\n"


def test_a_resolv_conf_that_leaves_nobody_to_ask_is_an_error_with_what_was_left_out():
    config = settings("upstream:\n  resolv_conf: resolv.conf\n")
    with pytest.raises(DocumentError) as caught:
        upstreams_of(config, OURSELVES, "resolv.conf", LOCAL)
    assert list(map(str, caught.value.problems)) == [
        f"{FILE}:2:16: upstream.resolv_conf: {NOBODY}",
        "resolv.conf:1:1: left out: 127.0.0.1:53 is this proxy itself",
        "resolv.conf:2:1: left out: 'nameserver nobody' names no address we can ask",
    ]


def test_routes_are_servers_enough():
    config = settings("upstream: {routes: {corp.example: [10.0.0.53]}}")
    servers, notes = upstreams_of(config, OURSELVES, "resolv.conf", LOCAL)
    assert (servers, len(notes)) == ([], 2)
    assert upstreams_of(config, "nameserver 192.0.2.1", "resolv.conf", LOCAL)[0] == [
        SocketAddress("192.0.2.1", 53)
    ]


@given(st.text(alphabet=st.sampled_from("nameserver 127.0:%[]\n\t#;"), max_size=200))
def test_any_resolv_conf_is_read(text):
    servers, notes = resolv_conf(text, "resolv.conf", [], LOCAL)
    assert len(servers) + len(notes) <= len(text.splitlines())


def test_a_route_with_a_star_is_refused_with_what_to_write():
    with pytest.raises(DocumentError, match="write the domain alone"):
        read('upstream: {servers: [192.0.2.1], routes: {"*.corp.example": [192.0.2.2]}}', "dnsproxy.yaml")


def test_an_address_to_listen_on_stands_once():
    with pytest.raises(DocumentError, match=r"127\.0\.0\.1:53 stands here twice"):
        read("listen: [127.0.0.1, '127.0.0.1:53']", "dnsproxy.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("conntrack: {longest: 5}", "conntrack.longest: less than `shortest`, which is 30 s"),
        ("metrics: {listen: '192.0.2.1:9253'}", "metrics.listen: '192.0.2.1:9253' is no loopback address"),
        ("admin: {listen: '127.0.0.1:9353'}", "admin.listen: every user of this host can reach a port"),
        ("warm_up: {interval: 0}", "warm_up.interval"),
    ],
)
def test_what_the_daemon_tells_others_is_bounded(text, message):
    with pytest.raises(DocumentError) as caught:
        read(text, "dnsproxy.yaml")
    assert message in str(caught.value)


def test_every_relative_path_is_taken_from_the_folder_of_the_settings():
    found = read("{state: {directory: state, preload: a.json}, admin: {socket: a.sock}}", "/etc/d/x.yaml")
    assert found.state.directory == Path("/etc/d/state")
    assert found.state.preload == Path("/etc/d/a.json")
    assert found.admin.socket == Path("/etc/d/a.sock")
