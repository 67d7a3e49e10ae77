"""Routers, played by a real web server and an SSDP responder on loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
from web_server import HANG_UP, SILENCE, reply, serving

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.agreement import Prefix
from dnsproxy.dyndns.client import Limits
from dnsproxy.dyndns.sources import SourceError, router

PATIENT = Limits(5.0, 5.0)
IP1, PPP1 = (f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:1", "WANPPPConnection:1"))


def soap(action, **values):
    inside = "".join(f"<{name}>{value}</{name}>" for name, value in values.items())
    return reply(
        200,
        '<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body>'
        f'<u:{action}Response xmlns:u="{IP1}">{inside}</u:{action}Response></s:Body></s:Envelope>',
    )


def fault(text):
    return reply(
        500,
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"><s:Body><s:Fault><detail>'
        '<UPnPError xmlns="urn:schemas-upnp-org:control-1-0"><errorCode>401</errorCode>'
        f"<errorDescription>{text}</errorDescription></UPnPError></detail></s:Fault></s:Body></s:Envelope>",
    )


def address(text):
    return soap("GetExternalIPAddress", NewExternalIPAddress=text)


def prefix(text, bits):
    return soap("X_AVM_DE_GetIPv6Prefix", NewIPv6Prefix=text, NewPrefixLength=bits, NewValidLifetime=7200)


async def ask_box(web, length=4, limits=PATIENT):
    return await router.ask(f"fritzbox:127.0.0.1:{web.port}", length, limits)


# --- FRITZ!Box


async def test_the_address_of_a_box():
    async with serving(address(" 93.184.216.34 ")) as web:
        assert await ask_box(web) == from_text("93.184.216.34")
    [seen] = web.seen
    assert (seen.method, seen.target) == ("POST", "/igdupnp/control/WANIPConn1")
    assert seen.headers["soapaction"] == f'"{IP1}#GetExternalIPAddress"'
    assert b"GetExternalIPAddress" in seen.body


async def test_the_prefix_of_a_box():
    async with serving(prefix("2a01:238:1:100::", 56)) as web:
        assert await ask_box(web, 16) == Prefix(from_text("2a01:238:1:100::"), 56)
    assert "X_AVM_DE_GetIPv6Prefix" in web.seen[0].headers["soapaction"]


@pytest.mark.parametrize(
    ("length", "answer", "word"),
    [
        (4, address(""), "DS-Lite"),
        (4, address("0.0.0.0"), "DS-Lite"),
        (4, address("127.0.0.1"), "local network"),
        (4, address("down"), "no address"),
        (4, soap("GetExternalIPAddress"), "DS-Lite"),
        (4, soap("GetSomethingElse", NewExternalIPAddress="8.8.8.8"), "something else"),
        (4, fault("Invalid Action"), "Invalid Action"),
        (4, reply(404, "<html>not here</html>"), "UPnP status information"),
        (4, reply(200, "8.8.8.8"), "no UPnP"),
        (4, reply(200, "<html>8.8.8.8"), "no UPnP"),
        (4, reply(200, '<!DOCTYPE a [<!ENTITY b "8.8.8.8">]><a>&b;</a>'), "no UPnP"),
        (4, reply(200, b"\xff\xfe\x00"), "no UPnP"),
        (4, HANG_UP, "broke off"),
        (16, prefix("", ""), "no IPv6 prefix"),
        (16, prefix("::", 0), "no IPv6 prefix"),
        (16, prefix("2a01:238:1:100::", "many"), "'many'"),
        (16, prefix("2a01:238:1:100::", 65), "'65'"),
        (16, prefix("nonsense", 56), "no address"),
    ],
)
async def test_what_is_no_answer(length, answer, word):
    async with serving(answer) as web:
        with pytest.raises(SourceError, match=word):
            await ask_box(web, length)
    assert len(web.seen) == 1


async def test_a_box_that_is_silent_or_not_there():
    async with serving(SILENCE) as web:
        with pytest.raises(SourceError, match=r"within 0\.2 s.*UPnP"):
            await ask_box(web, limits=Limits(5.0, 0.2))
    with pytest.raises(SourceError, match=r"no connection.*UPnP"):
        await ask_box(web)


async def test_a_name_that_leads_out_of_the_local_network_is_not_asked(monkeypatch):
    async def resolved(name, port, **more):
        assert (name, port) == ("fritz.box", 49000)
        return [(2, 1, 6, "", ("45.76.93.104", port))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", resolved, raising=False)
    with pytest.raises(SourceError, match=r"fritz\.box leads to 45\.76\.93\.104"):
        await router.ask("fritzbox", 4, PATIENT)


@pytest.mark.parametrize("where", ["127.0.0.1:many", "127.0.0.1:99999999"])
async def test_a_place_that_is_none(where):
    with pytest.raises(SourceError, match="host with a port"):
        await router.ask(f"fritzbox:{where}", 4, PATIENT)


# --- any other router


class Ssdp(asyncio.DatagramProtocol):
    def __init__(self, *answers):
        self.answers, self.seen = answers, []

    def connection_made(self, transport):
        self.transport = transport

    def datagram_received(self, data, peer):
        self.seen.append(data.decode())
        for answer in self.answers:
            self.transport.sendto(answer.encode("latin-1"), peer)


@asynccontextmanager
async def ssdp(*answers):
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_datagram_endpoint(
        lambda: Ssdp(*answers), local_addr=("127.0.0.1", 0)
    )
    protocol.port = transport.get_extra_info("sockname")[1]
    try:
        yield protocol
    finally:
        transport.close()


def located(location):
    return f"HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nLocation: {location}\r\nST: x\r\n\r\n"


def description(**services):
    listed = "".join(
        f"<service><serviceType>urn:schemas-upnp-org:service:{kind.replace('_', ':')}</serviceType>"
        f"<controlURL>{url}</controlURL></service>"
        for kind, url in services.items()
    )
    return reply(
        200,
        '<?xml version="1.0"?><root xmlns="urn:schemas-upnp-org:device-1-0"><device><deviceList><device>'
        f"<serviceList>{listed}</serviceList></device></deviceList></device></root>",
    )


def igd(described, **answers):
    """Answer GET with the description, and POST by its path."""
    return lambda seen: described if seen.method == "GET" else answers[seen.target.strip("/")]


async def ask_igd(web, *more, length=4, limits=PATIENT):
    answers = [*more, located(f"http://127.0.0.1:{web.port}/rootDesc.xml")]
    async with ssdp(*answers) as played:
        return await router.ask(f"igd:127.0.0.1:{played.port}", length, limits)


@pytest.mark.parametrize("kind", ["WANIPConnection_1", "WANIPConnection_2", "WANPPPConnection_1"])
async def test_a_router_is_found_by_its_description(kind):
    async with serving(igd(description(Other_1="/no", **{kind: "/ctl"}), ctl=address("8.8.8.8"))) as web:
        assert await ask_igd(web) == from_text("8.8.8.8")
    assert [seen.target for seen in web.seen] == ["/rootDesc.xml", "/ctl"]
    assert kind.replace("_", ":") in web.seen[1].headers["soapaction"]


async def test_of_two_lines_the_one_in_use_counts():
    described = description(WANIPConnection_1="/ip", WANPPPConnection_1="/ppp")
    async with serving(igd(described, ip=address(""), ppp=address("8.8.8.8"))) as web:
        assert await ask_igd(web) == from_text("8.8.8.8")
    async with serving(igd(described, ip=address(""), ppp=fault("no"))) as web:
        with pytest.raises(SourceError, match="refused"):
            await ask_igd(web)


async def test_an_answer_that_leads_elsewhere_is_not_followed():
    async with serving(igd(description(WANIPConnection_1="/ctl"), ctl=address("8.8.8.8"))) as web:
        others = [
            "nonsense",
            "HTTP/1.1 200 OK\r\n\r\n",
            located("http://127.0.0.2:1/x"),
            located("file:///etc/passwd"),
            located("http://[/"),
            "HTTP/1.1 500 No\r\nLocation: http://127.0.0.1:1/\r\n\r\n",
            "",
        ]
        assert await ask_igd(web, *others) == from_text("8.8.8.8")


@pytest.mark.parametrize(
    ("described", "word"),
    [
        (description(), "no router"),
        (description(Other_1="/x"), "no router"),
        (description(WANIPConnection_1="http://127.0.0.2:1/ctl"), "another device"),
        (description(WANIPConnection_1="http://["), "another device"),
        (description(WANIPConnection_1="file:///x"), "another device"),
        (description(WANIPConnection_1=" "), "no router"),
        (reply(404), "UPnP"),
        (reply(200, "<root>"), "UPnP"),
    ],
)
async def test_a_description_that_is_of_no_use(described, word):
    async with serving(lambda seen: described) as web:
        with pytest.raises(SourceError, match=word):
            await ask_igd(web)


async def test_silence_ends_and_the_question_was_put_twice():
    async with ssdp() as played:
        with pytest.raises(SourceError, match=r"no answer from 127\.0\.0\.1"):
            await router.ask(f"igd:127.0.0.1:{played.port}", 4, Limits(0.2, 5.0))
        assert len(played.seen) == 2
    assert played.seen[0].startswith("M-SEARCH * HTTP/1.1\r\n")
    assert "InternetGatewayDevice:1" in played.seen[0]
    assert played.seen[0].endswith("\r\n\r\n")


async def test_of_ipv6_such_a_router_tells_nothing():
    with pytest.raises(SourceError, match="interface:NAME"):
        await router.ask("igd", 16, PATIENT)
