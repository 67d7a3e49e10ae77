"""Real traffic through the templates: refused before, passes after, and nothing else passes.

    client 10.1.0.5 ---+
                       +--- router --- server 198.51.100.10
    other  10.2.0.x ---+

The client is inside a prefix of an endpoint that nothing restricts, so each refusal of it also shows that the
longest prefix decides. The other machine is three: an endpoint, one that no policy selects, and a stranger.
"""

import contextlib
import socket
import sys
from ipaddress import ip_network

import dns.message
import dns.query
import pytest

from dnsproxy import addresses
from dnsproxy.demo.lab import Lab, wait_for
from dnsproxy.endpoints import Endpoint, EndpointTable, built_in_host
from dnsproxy.namemanager import template
from dnsproxy.namemanager.elements import VERSIONS, Element, endpoint_set, key_of
from dnsproxy.namemanager.nft import NftSets

pytestmark = pytest.mark.kernel

TABLE = template.TABLE
MARK = 53

SERVER = {4: "198.51.100.10", 6: "2001:db8:100::10"}
SECOND = {4: "198.51.100.11", 6: "2001:db8:100::11"}
FOREIGN = {4: "203.0.113.53", 6: "2001:db8:ffff::53"}  # nobody has it
CLIENT = {4: "10.1.0.5", 6: "fd00:1::5"}
OTHER = {4: "10.2.0.5", 6: "fd00:2::5"}
UNSELECTED = {4: "10.2.0.6", 6: "fd00:2::6"}
STRANGER = {4: "10.2.0.7", 6: "fd00:2::7"}
ROUTER = {4: "10.1.0.1", 6: "fd00:1::1"}

families = pytest.mark.parametrize("version", VERSIONS)


def endpoint(name, *prefixes):
    return Endpoint("default", name, {"app": name}, tuple(ip_network(prefix) for prefix in prefixes))


ENDPOINTS = EndpointTable(
    [
        endpoint("client", *CLIENT.values()),
        endpoint("lan", "10.1.0.0/24", "fd00:1::/64"),
        endpoint("other", *OTHER.values()),
        endpoint("unselected", *UNSELECTED.values()),
    ],
    built_in_host(),
)
GOVERNED = {"default/client", "default/other", "default/host"}


class Box:
    """The network above; the server listens on ports 80, 81 and 853."""

    def __init__(self, lab):
        self.client, self.other, self.router, self.server = map(
            lab.namespace, ("client", "other", "router", "server")
        )
        lab.link(self.client, self.router, ["10.1.0.5/24", "fd00:1::5/64"], ["10.1.0.1/24", "fd00:1::1/64"])
        others = [
            f"{every[version]}/{length}"
            for every in (OTHER, UNSELECTED, STRANGER)
            for version, length in ((4, 24), (6, 64))
        ]
        lab.link(self.other, self.router, others, ["10.2.0.1/24", "fd00:2::1/64"])
        servers = ["198.51.100.10/24", "198.51.100.11/24", "2001:db8:100::10/64", "2001:db8:100::11/64"]
        lab.link(self.server, self.router, servers, ["198.51.100.1/24", "2001:db8:100::1/64"])
        for ns, gateways in (
            (self.client, ("10.1.0.1", "fd00:1::1")),
            (self.other, ("10.2.0.1", "fd00:2::1")),
            (self.server, ("198.51.100.1", "2001:db8:100::1")),
            (self.router, ("198.51.100.10", "2001:db8:100::10")),
        ):
            for gateway in gateways:
                ns.route("default", gateway)
        self.router.forward()
        self.listeners = {port: listening(self.server, port) for port in (80, 81, 853)}

    def load(self, text):
        self.router.run("nft", "-f", "-", stdin=text)

    def element(self, verb, version, key, *, name="client", kind="addr"):
        self.router.run(
            "nft", verb, "element", "inet", "dnsproxy", f"ep.default.{name}.{kind}{version}", f"{{ {key} }}"
        )

    def rules(self):
        return self.router.run("nft", "-s", "list", "ruleset").stdout


def listening(ns, port):
    return ns.call(lambda: socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True))


@pytest.fixture(scope="module")
def network():
    with Lab() as lab, contextlib.ExitStack() as stack:
        box = Box(lab)
        for listener in box.listeners.values():
            stack.enter_context(listener)
        yield box


@pytest.fixture
def box(network):
    network.router.run("nft", "flush", "ruleset")
    return network


def connect(ns, address, port=80, *, source="", mark=0):
    """Return a connection made in a namespace; an OSError says that it was refused."""

    def made():
        connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            connection.settimeout(5)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
            connection.bind((source, 0))
            connection.connect((address, port))
        except OSError:
            connection.close()
            raise
        return connection

    return ns.call(made)


def passes(*arguments, **options):
    """Tell whether a connection comes about; a silent drop is a time-out, which is neither."""
    try:
        connect(*arguments, **options).close()
    except ConnectionRefusedError:
        return False
    return True


# --- forward ---


@families
@pytest.mark.parametrize("kind", ["addr", "port"])
def test_forward_opens_what_was_learned_for_who_asked(box, version, kind):
    assert passes(box.client, SERVER[version])  # the network carries
    box.load(template.forward(ENDPOINTS, GOVERNED))
    assert not passes(box.client, SERVER[version])
    key = SERVER[version] if kind == "addr" else f"{SERVER[version]} . tcp . 80"
    box.element("add", version, key, kind=kind)
    assert passes(box.client, SERVER[version])
    assert not passes(box.client, SECOND[version])
    assert passes(box.client, SERVER[version], 81) == (kind == "addr")
    assert not passes(box.other, SERVER[version], source=OTHER[version])
    box.element("delete", version, key, kind=kind)
    assert not passes(box.client, SERVER[version])


@families
def test_forward_leaves_everybody_else_alone(box, version):
    box.load(template.forward(ENDPOINTS, GOVERNED))
    assert not passes(box.other, SERVER[version], source=OTHER[version])
    assert passes(box.other, SERVER[version], source=UNSELECTED[version])
    assert passes(box.other, SERVER[version], source=STRANGER[version])
    with listening(box.client, 80):  # from outside to an endpoint, replies included
        assert passes(box.server, CLIENT[version])
    assert passes(box.router, SERVER[version])  # not forwarded


@families
def test_an_open_connection_outlives_its_element(box, version):
    box.load(template.forward(ENDPOINTS, GOVERNED))
    box.element("add", version, SERVER[version])
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(connect(box.client, SERVER[version]))
        theirs = stack.enter_context(accepted(box.listeners[80], ours))
        box.element("delete", version, SERVER[version])
        assert not passes(box.client, SERVER[version])
        for sender, receiver in ((ours, theirs), (theirs, ours)):
            sender.sendall(b"still here")
            assert receiver.recv(100) == b"still here"


def accepted(listener, peer):
    """Return the listener's end of a connection; those of earlier tests wait in front of it."""
    listener.settimeout(5)
    while True:
        connection, (_, port, *_) = listener.accept()
        if port == peer.getsockname()[1]:
            connection.settimeout(5)
            return connection
        connection.close()


@families
def test_forward_refuses_datagrams_with_a_word(box, version):
    """UDP, and with it DNS to somebody else; DNS over TLS is TCP."""
    box.load(template.forward(ENDPOINTS, GOVERNED))
    assert not passes(box.client, SERVER[version], 853)
    datagrams = box.client.call(
        lambda: socket.socket(socket.AF_INET6 if version == 6 else socket.AF_INET, socket.SOCK_DGRAM)
    )
    with datagrams:
        datagrams.settimeout(5)
        datagrams.connect((SERVER[version], 53))
        datagrams.send(b"query")
        with pytest.raises(OSError, match=r"Permission denied|No route to host"):
            datagrams.recv(100)


# --- output ---


@families
def test_output_opens_what_the_host_has_learned(box, version):
    box.load(template.output(ENDPOINTS, GOVERNED, mark=MARK))
    assert not passes(box.router, SERVER[version])
    assert passes(box.router, SERVER[version], mark=MARK)
    assert passes(box.client, SERVER[version])  # forwarded, so not its business
    box.element("add", version, f"{SERVER[version]} . tcp . 80", name="host", kind="port")
    assert passes(box.router, SERVER[version])
    assert not passes(box.router, SERVER[version], 81)
    assert not passes(box.router, SECOND[version])


@families
def test_output_leaves_the_host_reachable_also_for_itself(box, version):
    box.load(template.output(ENDPOINTS, GOVERNED))
    with listening(box.router, 22):
        assert passes(box.client, ROUTER[version], 22)
        assert passes(box.router, ROUTER[version], 22)
        assert passes(box.router, {4: "127.0.0.1", 6: "::1"}[version], 22)


@families
def test_output_finds_neighbours(box, version):
    """Without neighbour discovery IPv6 would work only as long as the neighbour is remembered."""
    box.load(template.output(ENDPOINTS, GOVERNED))
    box.element("add", version, SERVER[version], name="host")
    box.router.run("ip", "neighbour", "flush", "all")
    assert passes(box.router, SERVER[version])


def test_output_of_a_host_that_no_policy_selects(box):
    box.load(template.output(ENDPOINTS, set()))
    assert passes(box.router, SERVER[4])


# --- redirect ---

ZONE = """
demo.test. 60 SOA ns.demo.test. hostmaster.demo.test. 1 3600 600 86400 30
www.demo.test. 60 A {}
"""
OURS, THEIRS = "192.0.2.1", "192.0.2.2"
PORT = 5353


@pytest.fixture(scope="module")
def resolvers(network):
    """Ours on the router, on the addresses that redirected queries come to, and a stranger on the server."""
    serve(network.router, OURS, PORT, *ROUTER.values(), "127.0.0.1", "::1", "10.2.0.1", "fd00:2::1")
    serve(network.server, THEIRS, 53, *SERVER.values())


def serve(ns, answer, port, *hosts):
    path, log = ns.directory / f"{ns.name}.zone", ns.directory / f"{ns.name}-zone.log"
    path.write_text(ZONE.format(answer))
    listen = [f"--listen=[{host}]:{port}" if ":" in host else f"--listen={host}:{port}" for host in hosts]
    server = ns.popen(sys.executable, "-m", "dnsproxy.demo.zone", str(path), *listen, log=log)
    wait_for(lambda: "listening on" in log.read_text() or server.poll() is not None, what="the zone server")
    assert server.poll() is None, log.read_text()


def asked(ns, server, stream, *, source="", mark=0):
    """Return the address that www.demo.test has according to `server`."""
    query = dns.message.make_query("www.demo.test", "A")
    kind = socket.SOCK_STREAM if stream else socket.SOCK_DGRAM
    with ns.call(lambda: socket.socket(socket.AF_INET6 if ":" in server else socket.AF_INET, kind)) as asking:
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_MARK, mark)
        asking.bind((source, 0))
        if stream:
            asking.settimeout(5)
            asking.connect((server, 53))
            reply = dns.query.tcp(query, server, 5, sock=asking)
        else:
            asking.setblocking(False)
            reply = dns.query.udp(query, server, 5, sock=asking)
    return reply.answer[0][0].address


streams = pytest.mark.parametrize("stream", [False, True], ids=["udp", "tcp"])


@families
@streams
def test_redirect_brings_the_endpoints_queries_here(box, resolvers, version, stream):
    box.load(template.redirect(ENDPOINTS, port=PORT, mark=MARK))
    assert asked(box.client, FOREIGN[version], stream) == OURS
    assert asked(box.client, SERVER[version], stream) == OURS
    assert asked(box.client, ROUTER[version], stream) == OURS
    assert asked(box.other, SERVER[version], stream, source=OTHER[version]) == OURS
    assert asked(box.other, SERVER[version], stream, source=STRANGER[version]) == THEIRS


@families
@streams
def test_redirect_brings_the_hosts_queries_here_but_not_the_proxys(box, resolvers, version, stream):
    assert asked(box.router, SERVER[version], stream) == THEIRS
    box.load(template.redirect(ENDPOINTS, port=PORT, mark=MARK))
    assert asked(box.router, SERVER[version], stream) == OURS
    assert asked(box.router, FOREIGN[version], stream) == OURS
    assert asked(box.router, {4: "127.0.0.53", 6: "::1"}[version], stream) == OURS
    assert asked(box.router, SERVER[version], stream, mark=MARK) == THEIRS


@families
@streams
def test_all_three_together(box, resolvers, version, stream):
    box.load(template.forward(ENDPOINTS, GOVERNED))
    box.load(template.output(ENDPOINTS, GOVERNED, mark=MARK))
    box.load(template.redirect(ENDPOINTS, port=PORT, mark=MARK))
    assert asked(box.client, FOREIGN[version], stream) == OURS
    assert asked(box.router, FOREIGN[version], stream) == OURS
    assert asked(box.router, SERVER[version], stream, mark=MARK) == THEIRS
    assert not passes(box.client, SERVER[version], 853)
    assert not passes(box.router, SERVER[version], 853)


# --- loading ---

TEXTS = {
    "forward": template.forward(ENDPOINTS, GOVERNED),
    "output": template.output(ENDPOINTS, GOVERNED),
    "redirect": template.redirect(ENDPOINTS, port=PORT),
}


def test_loading_again_changes_nothing_and_forgets_nothing(box):
    for text in TEXTS.values():
        box.load(text)
    box.element("add", 4, '198.51.100.10 comment "www.demo.test."')
    before = box.rules()
    assert "www.demo.test." in before
    for text in TEXTS.values():
        box.load(text)
    assert box.rules() == before


def test_loading_for_other_endpoints_replaces_the_rules(box):
    box.load(TEXTS["forward"])
    box.load(template.forward(ENDPOINTS, {"default/other"}))
    assert passes(box.client, SERVER[4])
    assert not passes(box.other, SERVER[4], source=OTHER[4])


@pytest.mark.parametrize("first", ["template", "daemon"])
async def test_template_and_daemon_agree_whoever_comes_first(box, first):
    specs = [
        endpoint_set(TABLE, "default/client", version, ports=ports)
        for version in VERSIONS
        for ports in (False, True)
    ]
    sets = box.router.call(NftSets)
    try:
        if first == "template":
            box.load(TEXTS["forward"])
        await sets.ensure(specs)
        if first == "daemon":
            box.load(TEXTS["forward"])
        assert not passes(box.client, SERVER[4])
        key = key_of(addresses.from_text(SERVER[4]), 6, 80)
        await sets.commit([], [Element(specs[1], key, "www.demo.test.")])
        assert passes(box.client, SERVER[4])
        await sets.ensure(specs)
    finally:
        await sets.close()
