from dnsproxy.names import from_text
from dnsproxy.servers import FAILURES, LONGEST_PAUSE, SHIFT, Channel, Routes, Server, in_order


class Deaf:
    def send(self, wire, peer):
        raise AssertionError("nothing is sent here")


def test_the_longest_suffix_wins_on_whole_labels():
    corp, lab, world = Server("192.0.2.1"), Server("192.0.2.2"), Server("192.0.2.3")
    routes = Routes([world], {from_text("corp.test"): [corp], from_text("lab.corp.test"): [lab]})
    asked = {
        name: routes.of(from_text(name), 0.0)
        for name in ("a.lab.corp.test", "lab.corp.test", "corp.test", "xcorp.test", ".")
    }
    assert asked == {
        "a.lab.corp.test": (lab,),
        "lab.corp.test": (lab,),
        "corp.test": (corp,),
        "xcorp.test": (world,),
        ".": (world,),
    }
    assert list(routes) == [world, corp, lab]


def test_a_route_for_the_root_is_the_default_of_last_resort():
    root, world = Server("192.0.2.1"), Server("192.0.2.3")
    assert Routes([world], {b"\x00": [root]}).of(from_text("any.test"), 0.0) == (root,)


def test_one_failure_does_not_move_a_server():
    first, second = Server("192.0.2.1"), Server("192.0.2.2")
    first.failed(10.0, 10.0)
    assert in_order((first, second), 10.0) == (first, second)


def test_a_failing_server_steps_behind_and_one_query_tries_it_again():
    first, second = Server("192.0.2.1"), Server("192.0.2.2")
    for _ in range(FAILURES):
        first.failed(10.0, 10.0)
    assert in_order((first, second), 10.5) == (second, first)
    assert in_order((first, second), 11.0) == (first, second), "the pause is over: one query tries it"
    assert in_order((first, second), 11.0) == (second, first), "and only one"
    first.worked()
    assert in_order((first, second), 11.1) == (first, second)


def test_the_pause_doubles_up_to_a_minute():
    server = Server("192.0.2.1")
    pauses = []
    for _ in range(FAILURES + 10):
        server.failed(0.0, 0.0)
        pauses.append(server.retry_at)
    assert pauses[FAILURES - 1 : FAILURES + 3] == [1.0, 2.0, 4.0, 8.0]
    assert max(pauses) == LONGEST_PAUSE


def test_what_was_in_flight_when_a_server_stepped_back_is_no_further_failure():
    server = Server("192.0.2.1")
    for _ in range(500):
        server.failed(9.9, 10.0)
    assert (server.failures, server.retry_at) == (FAILURES, 11.0)
    server.failed(11.0, 12.0)
    assert server.retry_at == 14.0


def test_when_all_fail_all_are_still_asked():
    servers = (Server("192.0.2.1"), Server("192.0.2.2"))
    for server in servers:
        for _ in range(FAILURES):
            server.failed(10.0, 10.0)
    assert in_order(servers, 10.1) == servers


def test_sockets_take_turns_and_none_is_no_channel():
    server = Server("192.0.2.1")
    assert server.channel(stream=False) is None
    assert server.channel(stream=True) is None
    server.udp = [Channel(server, Deaf(), stream=False) for _ in range(3)]
    used = [server.channel(stream=False) for _ in range(3 << SHIFT)]
    assert all(used.count(channel) == 1 << SHIFT for channel in server.udp)


def test_text_brackets_an_ipv6_address():
    assert str(Server("::1", 5353)) == "[::1]:5353"
    assert str(Server("192.0.2.1")) == "192.0.2.1:53"
