"""The router: what it has as its own address, by UPnP's Internet Gateway Device (IGD), without a login.

    fritzbox[:HOST[:PORT]]   AVM's boxes, whose place of the service is known; also the IPv6 prefix of the LAN
    igd[:HOST[:PORT]]        any other: found by SSDP, by multicast or at HOST, then by its description

A router's own IPv6 address is not that of a host behind it, so of IPv6 it tells the prefix. The answers come
from the local network over plain HTTP. A router is near: a name that leads to a public address (`fritz.box`
can be bought) is not asked, nor is a device that sends us on to another one.
"""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import urljoin, urlsplit
from xml.etree import ElementTree as ET

from dnsproxy.addresses import from_text, is_public
from dnsproxy.dyndns.agreement import Prefix
from dnsproxy.dyndns.client import Failure, Limits, Question, Response, fetch
from dnsproxy.dyndns.outcomes import printable
from dnsproxy.dyndns.sources import SourceError, read_address

if TYPE_CHECKING:
    from collections.abc import Mapping

BOX: Final = "fritz.box"
BOX_PORT: Final = 49000
BOX_PATH: Final = "/igdupnp/control/WANIPConn1"
SSDP: Final = ("239.255.255.250", 1900)
SERVICES: Final = tuple(
    f"urn:schemas-upnp-org:service:{name}" for name in ("WANIPConnection:2", "WANIPConnection:1",
                                                        "WANPPPConnection:1")
)  # fmt: skip
SEARCH: Final = "urn:schemas-upnp-org:device:InternetGatewayDevice:1"
SWITCH: Final = "switch on its UPnP status information (FRITZ!Box: Home Network > Network > Network Settings)"


class Place(NamedTuple):
    """Where a service takes its calls."""

    url: str
    service: str


async def ask(source: str, length: int, limits: Limits) -> bytes | Prefix:
    """Return the packed IPv4 address of a router, or the IPv6 prefix that it delegates."""
    kind, _, where = source.partition(":")
    if kind == "fritzbox":
        place = await _box(where or BOX)
        return await (_address(place, limits) if length == 4 else _prefix(place, limits))
    if length != 4:
        raise SourceError("tells no IPv6 address: use fritzbox or interface:NAME, with a suffix")
    places = await _discover(where, limits)
    for place in places[:-1]:
        try:
            return await _address(place, limits)
        except SourceError:  # a line that is not in use; the next service may be
            continue
    return await _address(places[-1], limits)


async def _box(where: str) -> Place:
    host, port = await _near(where, BOX_PORT)
    return Place(f"http://{host}:{port}{BOX_PATH}", SERVICES[1])


async def _near(where: str, port: int) -> tuple[str, int]:
    """Return the IPv4 address and the port of a router."""
    name, _, given = where.partition(":")
    try:
        port = _port(given) if given else port
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, port, family=socket.AF_INET, type=socket.SOCK_STREAM)
    except socket.gaierror:
        raise SourceError(f"{name} cannot be resolved: write the router's address behind a colon") from None
    except ValueError:
        raise SourceError(f"{where} is no host with a port") from None
    host = str(found[0][4][0])
    if host != name and is_public(from_text(host)):
        raise SourceError(f"{name} leads to {host}, which is not in this network: write the router's address")
    return host, port


def _port(text: str) -> int:
    if text.isascii() and text.isdecimal() and 0 < int(text) < 65536:
        return int(text)
    raise ValueError(text)


# --- SOAP


async def _address(place: Place, limits: Limits) -> bytes:
    text = (await _call(place, "GetExternalIPAddress", limits)).get("NewExternalIPAddress", "").strip()
    if text in ("", "0.0.0.0"):
        raise SourceError("has no IPv4 address: the line is down, or has IPv6 alone (DS-Lite)")
    address = read_address(text)
    if text == urlsplit(place.url).hostname:
        raise SourceError(f"answered {text}, its address in the local network")
    return address


async def _prefix(place: Place, limits: Limits) -> Prefix:
    values = await _call(place, "X_AVM_DE_GetIPv6Prefix", limits)
    text, bits = values.get("NewIPv6Prefix", "").strip(), values.get("NewPrefixLength", "").strip()
    if text in ("", "::"):
        raise SourceError("has no IPv6 prefix: IPv6 is off, or the line is down")
    if not (bits.isascii() and bits.isdecimal() and 1 <= int(bits) <= 64):
        raise SourceError(f"answered a prefix of {printable(bits)[:20]!r} bits")
    return Prefix(read_address(text), int(bits))


async def _call(place: Place, action: str, limits: Limits) -> Mapping[str, str]:
    """Return what an action of a service answers, by the names of its values."""
    body = (
        '<?xml version="1.0" encoding="utf-8"?>'
        '<s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/"'
        ' s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>'
        f'<u:{action} xmlns:u="{place.service}"/></s:Body></s:Envelope>'
    )
    headers = {"Content-Type": 'text/xml; charset="utf-8"', "SOAPAction": f'"{place.service}#{action}"'}
    response = await _fetch(Question(place.url, "POST", headers, body.encode(), socket.AF_INET), limits)
    root = _xml(response)
    if response.status != 200:
        said = root.findtext(".//{*}errorDescription") or f"HTTP {response.status}"
        raise SourceError(f"refused {action} ({printable(said)[:60]}); {SWITCH}")
    answer = root.find(f".//{{*}}{action}Response")
    if answer is None:
        raise SourceError(f"answered something else than {action}")
    return {value.tag.rpartition("}")[2]: value.text or "" for value in answer}


async def _fetch(question: Question, limits: Limits) -> Response:
    response = await fetch(question, limits)
    if isinstance(response, Failure):
        raise SourceError(f"{response.reason}; is it the router? If so, {SWITCH}")
    return response


def _xml(response: Response) -> ET.Element:
    """Return the root of an XML answer. One with a document type is refused, since entities come with it."""
    text = response.body.decode("utf-8-sig", "replace")
    try:
        if "<!DOCTYPE" not in text:
            return ET.fromstring(text)
    except ET.ParseError:
        pass
    raise SourceError(f"answered no UPnP (HTTP {response.status}); {SWITCH}")


# --- discovery


async def _discover(where: str, limits: Limits) -> list[Place]:
    target = await _near(where, SSDP[1]) if where else SSDP
    location = await _location(target, limits.connect)
    response = await _fetch(Question(location, family=socket.AF_INET), limits)
    root = _xml(response)
    found = {
        node.findtext("{*}serviceType"): (node.findtext("{*}controlURL") or "").strip()
        for node in root.findall(".//{*}service")
    }
    places = [Place(_joined(location, found[kind]), kind) for kind in SERVICES if found.get(kind)]
    if not places:
        raise SourceError("is no router that tells its address (no WANIPConnection)")
    return places


def _joined(location: str, url: str) -> str:
    """Return the URL that a description names, which must be at the device that it describes."""
    try:
        whole = urljoin(location, url)
        if urlsplit(whole).netloc == urlsplit(location).netloc and whole.startswith("http://"):
            return whole
    except ValueError:
        pass
    raise SourceError("sends us on to another device")


class _Listener(asyncio.DatagramProtocol):
    """Takes the first answer to a search that names a place at the device which sent it."""

    def __init__(self) -> None:
        self.location: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        location = _header(data)
        try:
            own = urlsplit(location).hostname == sender[0]
        except ValueError:
            return
        if own and location.startswith("http://") and not self.location.done():
            self.location.set_result(location)

    def error_received(self, error: Exception) -> None:
        if not self.location.done():
            self.location.set_exception(error)


def _header(data: bytes) -> str:
    lines = data.decode("latin-1").splitlines()
    named = (line.partition(":") for line in lines[1:] if lines[0].startswith("HTTP/1.1 200"))
    return next((value.strip() for name, _, value in named if name.strip().lower() == "location"), "")


async def _location(target: tuple[str, int], patience: float) -> str:
    """Return where the description of the router is; asked twice, since a datagram may be lost."""
    message = (
        f'M-SEARCH * HTTP/1.1\r\nHOST: {target[0]}:{target[1]}\r\nMAN: "ssdp:discover"\r\n'
        f"MX: 1\r\nST: {SEARCH}\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    transport, listener = await loop.create_datagram_endpoint(_Listener, family=socket.AF_INET)
    try:
        for _ in range(2):
            transport.sendto(message.encode(), target)
            done, _pending = await asyncio.wait([listener.location], timeout=patience / 2)
            if done:
                return listener.location.result()
    finally:
        transport.close()
    who = "any router" if target == SSDP else target[0]
    raise SourceError(f"no answer from {who} by SSDP: {SWITCH}, or name it behind a colon")
