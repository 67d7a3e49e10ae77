"""The documents of DynDNS: `Domain`, a host whose records we keep, and Kubernetes' `Secret`.

A Domain is the original controller's (dyndns.contrib.strato.com/v1alpha1), with optional fields of ours that
its CRD leaves out. What it accepted and could never work is refused here: a single label, a number for a
name, an address that nobody can reach. What may still come, a Secret above all, is waited for and noted.

The texts may hold any other kind, which is passed over. No message quotes what stands in a Secret.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from dataclasses import dataclass, field
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, Self, TypeAlias
from urllib.parse import urlsplit

import idna
from pydantic import AfterValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic.alias_generators import to_camel

from dnsproxy.addresses import Network, inside, is_public
from dnsproxy.dyndns.outcomes import SOURCE, Known, Password, Search, Wanted
from dnsproxy.errors import DocumentError, Problem
from dnsproxy.yamldoc import Document, FaultError, Model, check, parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

GROUP: Final = "dyndns.contrib.strato.com"
VERSION: Final = "v1alpha1"
ENDPOINT: Final = "https://dyndns.strato.com/nic/update"
KEY: Final = "password"  # in a Secret
LEAST_INTERVAL: Final = 5  # minutes
LEAST_REFRESH: Final = 25  # days; a touch every 28 is what dyndns2 allows
MAX_INTERVAL: Final = 2**31 - 1  # what an int32 of the original CRD holds

# --- texts


def _fqdn(text: str) -> str:
    """Check a host name, as people write it; `ascii_name` is what is sent."""
    if "*" in text:
        raise ValueError(f"{text!r}: no wildcards; a record is one host name")
    name = ascii_name(text)
    if len(name) > 253:
        raise ValueError(f"{text[:40]!r}... has {len(name)} characters; 253 is the most")
    labels = name.split(".")
    if wrong := next((label for label in labels if not _LABEL(label)), None):
        raise ValueError(f"{text!r}: {wrong!r} is no label: letters, digits and '-' inside, 63 at most")
    if not all(labels):
        raise ValueError(f"{text!r} has an empty label: write single dots between labels, none at the end")
    if len(labels) == 1:
        raise ValueError(f"{text!r} is a single label: write the whole name, such as www.example.de")
    if labels[-1].isdecimal():
        raise ValueError(f"{text!r} is an address: a host name is expected")
    return text


_LABEL: Final = re.compile(r"(?:[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)?", re.ASCII).fullmatch


def ascii_name(text: str) -> str:
    """Return a host name as it is sent: lower-case, an international one in its A-labels; else ValueError."""
    if text.isascii():
        return text.lower()
    try:
        return idna.encode(text, uts46=True, transitional=False).decode()
    except idna.IDNAError as error:
        raise ValueError(f"{text!r} is no international name: {error}") from None


def _ipv4(text: str) -> str:
    try:
        IPv4Address(text)
    except ValueError:
        raise ValueError(f"{text!r} is no IPv4 address such as 93.184.216.34") from None
    return text


def _ipv6(text: str) -> str:
    try:
        address = IPv6Address(text)
    except ValueError:
        address = None
    if address is None or address.scope_id or address.ipv4_mapped:
        raise ValueError(f"{text!r} is no IPv6 address such as 2a01:238:1::1")
    return str(address)


def _suffix(text: str) -> str:
    """Check `::1:2:3:4/64`: host bits, and how many bits of the found address stand before them."""
    bits, slash, length = text.partition("/")
    number = int(IPv6Address(_ipv6(bits)))
    if not slash or not length.isdecimal() or not 1 <= int(length) <= 127:
        raise ValueError(f"{text!r}: expected host bits and the length of the prefix, such as ::1/64")
    if number >> (128 - int(length)):
        raise ValueError(f"{text!r}: the host bits reach into the {length} bits of the prefix")
    if not number:
        raise ValueError(f"{text!r}: without host bits it would be the prefix that is published")
    return text


def _source(text: str) -> str:
    if not SOURCE(text):
        raise ValueError(
            f"{text!r} is no source: expected an https:// service, dns:opendns, dns:cloudflare, fritzbox,"
            " igd, interface:NAME or file:/PATH"
        )
    return text


def _range(text: str) -> str:
    try:
        ip_network(text)
    except ValueError as error:
        raise ValueError(f"{text!r} is no range of addresses such as 10.0.0.0/8: {error}") from None
    return text


def _endpoint(text: str) -> str:
    url = urlsplit(text)
    if url.scheme != "https":
        raise ValueError("expected https://: over anything else the password could be read on the way")
    if "@" in url.netloc or url.query or url.fragment or not url.hostname or not text.isprintable():
        raise ValueError("expected https://HOST/PATH alone, such as " + ENDPOINT)
    return text


def _username(text: str) -> str:
    if not text or ":" in text or not text.isprintable():
        raise ValueError("a user name is not empty and has no colon and no control characters")
    return text


def _absolute(text: str) -> str:
    if not text.startswith("/") or "\0" in text:
        raise ValueError(f"{text!r} is no absolute path")
    return text


def _word(text: str) -> str:
    if not re.fullmatch(r"[-\w.]+", text, re.ASCII):
        raise ValueError(f"{text!r} is no name: letters, digits, '-', '_' and '.'")
    return text


def _object_name(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9](?:[-a-z0-9.]{0,251}[a-z0-9])?", text, re.ASCII):
        raise ValueError(f"{text!r} is no object's name: lower-case letters, digits, '-' and '.'")
    return text


def _schema(**more: Any) -> Any:  # noqa: ANN401 - what goes into a JSON schema, for Field
    return Field(json_schema_extra=more)


_HOST_PATTERN: Final = r"^[^\s*_.@:/]{1,63}(\.[^\s*_.@:/]{1,63})+$"
_IPV4_PATTERN: Final = (
    r"^((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])$"
)

Fqdn: TypeAlias = Annotated[str, AfterValidator(_fqdn), _schema(pattern=_HOST_PATTERN, maxLength=253)]
Ipv4: TypeAlias = Annotated[str, AfterValidator(_ipv4), _schema(pattern=_IPV4_PATTERN)]
Ipv6: TypeAlias = Annotated[str, AfterValidator(_ipv6), _schema(format="ipv6")]
Suffix: TypeAlias = Annotated[str, AfterValidator(_suffix)]
Source: TypeAlias = Annotated[str, AfterValidator(_source)]
Range: TypeAlias = Annotated[str, AfterValidator(_range)]
Endpoint: TypeAlias = Annotated[str, AfterValidator(_endpoint), _schema(pattern="^https://")]
Username: TypeAlias = Annotated[str, AfterValidator(_username)]
Absolute: TypeAlias = Annotated[str, AfterValidator(_absolute)]
Word: TypeAlias = Annotated[str, AfterValidator(_word)]
ObjectName: TypeAlias = Annotated[str, AfterValidator(_object_name)]
FamilyName: TypeAlias = Literal["ipv4", "ipv6"]


# --- models


class CamelModel(Model):
    """A model whose keys are written in camel case."""

    model_config = ConfigDict(alias_generator=to_camel)


class Metadata(CamelModel):
    """Who an object is. What only a Kubernetes API server writes is taken and not looked at."""

    name: ObjectName
    namespace: ObjectName = "default"
    labels: dict[str, str] | None = None
    annotations: Any = Field(None, repr=False)  # a copy of a whole Secret may stand there
    uid: Any = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None
    deletion_grace_period_seconds: Any = None
    resource_version: Any = None
    generation: Any = None
    generate_name: Any = None
    managed_fields: Any = None
    owner_references: Any = None
    finalizers: Any = None
    self_link: Any = None


class PasswordReference(CamelModel):
    """Where the password is: in a Secret, or in one of the places of ours."""

    name: ObjectName | None = Field(None, description="Name of a Secret; its key is password.")
    namespace: ObjectName | None = Field(None, description="Namespace of the Secret; the Domain's own.")
    file: Absolute | None = Field(None, description="A file that holds the password.")
    env: Word | None = Field(None, description="An environment variable that holds the password.")
    credential: Word | None = Field(None, description="A systemd credential (LoadCredential=).")

    @model_validator(mode="before")
    @classmethod
    def _no_empty_name(cls, value: Any) -> Any:  # noqa: ANN401 - any plain value
        if isinstance(value, dict) and value.get("name") == "":
            raise FaultError("empty: name the Secret that holds the password", "name")
        return value

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        if sum(each is not None for each in (self.name, self.file, self.env, self.credential)) != 1:
            raise ValueError("expected one of name (of a Secret), file, env and credential")
        return self


class Sources(CamelModel):
    """Who is asked for an address, by family; the built-in ones where nothing is said."""

    ipv4: list[Source] = Field([], description="Sources of the IPv4 address, in order.")
    ipv6: list[Source] = Field([], description="Sources of the IPv6 address, in order.")


class DomainSpec(CamelModel):
    """A host name, whose password, and where its addresses come from."""

    fqdn: Fqdn = Field(description="The host name whose records are kept.")
    ip_address: Ipv4 | None = Field(None, description="A fixed IPv4 address: Manual mode.")
    enabled: bool = Field(True, description="Whether the records are kept at all.")
    interval: int = Field(
        LEAST_INTERVAL, ge=LEAST_INTERVAL, le=MAX_INTERVAL, description="Minutes between two checks."
    )
    password: PasswordReference = Field(description="The DynDNS password.")
    ipv6_address: Ipv6 | None = Field(None, description="A fixed IPv6 address.")
    families: list[FamilyName] | None = Field(
        None, description="Which records are kept; those of the fixed addresses, else ipv4."
    )
    username: Username | None = Field(None, description="The user name, where it is not the fqdn.")
    endpoint: Endpoint = Field(ENDPOINT, description="The update service, which speaks dyndns2.")
    sources: Sources = Field(Sources(), description="Who is asked for the addresses.")
    quorum: int | None = Field(
        None, ge=1, le=5, description="How many sources have to agree on a change; 2 where there are two."
    )
    suffix: Suffix | None = Field(
        None, description="Host bits behind a found IPv6 prefix, such as ::1:2:3:4/64."
    )
    allow_ranges: list[Range] = Field([], description="Ranges that are published though they are not public.")
    refresh_days: int | None = Field(
        None, ge=LEAST_REFRESH, description="Days after which an unchanged record is sent again; never."
    )
    after_abuse: Literal["wait", "stop"] = Field(
        "wait", description="After abuse: wait for an hour and longer, or stop until somebody says resume."
    )

    @model_validator(mode="after")
    def _fits(self) -> Self:
        self._families_fit()
        self._addresses_fit()
        self._quorum_fits()
        return self

    def _families_fit(self) -> None:
        if self.families is not None and not self.families:
            raise FaultError("empty: a record has ipv4, ipv6 or both; enabled: false rests it", "families")
        for key, family, value in (
            ("ipAddress", "ipv4", self.ip_address),
            ("ipv6Address", "ipv6", self.ipv6_address),
            ("suffix", "ipv6", self.suffix),
        ):
            if value is not None and family not in self.managed:
                raise FaultError(f"given, but {family} is not among the families", key)
        if self.suffix is not None and self.ipv6_address is not None:
            raise FaultError("a fixed ipv6Address takes no suffix", "suffix")

    def _addresses_fit(self) -> None:
        for key, address in (("ipAddress", self.ip_address), ("ipv6Address", self.ipv6_address)):
            if address is not None and not self._is_publishable(address):
                raise FaultError(
                    f"{address} is not public: nobody outside could reach it (allowRanges permits it)", key
                )

    def _is_publishable(self, address: str) -> bool:
        packed = (IPv6Address if ":" in address else IPv4Address)(address).packed
        return is_public(packed) or inside(packed, self.allowed)

    def _quorum_fits(self) -> None:
        for family in self.managed:
            given = getattr(self.sources, family)
            if given and self.quorum is not None and self.quorum > len(given):
                raise FaultError(f"{len(given)} sources of {family} cannot make {self.quorum}", "quorum")

    @property
    def managed(self) -> tuple[FamilyName, ...]:
        """The families whose records are kept, IPv4 first."""
        if self.families is not None:
            return tuple(family for family in ("ipv4", "ipv6") if family in self.families)
        if self.ipv6_address is None and self.suffix is None:
            return ("ipv4",)
        return ("ipv6",) if self.ip_address is None else ("ipv4", "ipv6")

    @property
    def allowed(self) -> tuple[Network, ...]:
        """The ranges of allowRanges."""
        return tuple(map(ip_network, self.allow_ranges))


class DomainDocument(CamelModel):
    """One host whose records are kept."""

    api_version: str
    kind: str
    metadata: Metadata
    spec: DomainSpec
    status: Any = None  # what another controller wrote


def _decoded(value: object) -> Password:
    try:
        return Password(base64.b64decode("".join(_secret_text(value).split()), validate=True))
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("not base64: use stringData for plain text") from None


def _plain(value: object) -> Password:
    return Password(_secret_text(value).encode("utf-8", "surrogateescape"))


def _secret_text(value: object) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("expected text: write it in quotes")


class SecretDocument(CamelModel):
    """Kubernetes' Secret, of which only the key `password` is used."""

    api_version: str
    kind: str
    metadata: Metadata
    type: str = "Opaque"
    data: dict[str, Annotated[Password, PlainValidator(_decoded)]] | None = Field(None, repr=False)
    string_data: dict[str, Annotated[Password, PlainValidator(_plain)]] | None = Field(None, repr=False)
    immutable: bool | None = None

    @property
    def password(self) -> Password | None:
        """The password; None where the key is missing."""
        found = ((self.data or {}) | (self.string_data or {})).get(KEY)
        return None if found is None else stripped(found)


def stripped(password: Password) -> Password:
    """Return a password without the newline that editors and `echo` leave at its end."""
    return Password(password.reveal().removesuffix(b"\n").removesuffix(b"\r"))


# --- what the rest of the program gets


class Place(NamedTuple):
    """Where a password is that no document holds: a file, an environment variable, a systemd credential."""

    kind: Literal["file", "env", "credential"]
    name: str


class Missing(NamedTuple):
    """No password for now, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Domain:
    """A checked Domain: one host whose records are kept. Seconds, packed addresses, A-labels."""

    namespace: str
    name: str
    fqdn: str  # as it was written
    hostname: str  # as it is sent
    enabled: bool
    interval: float
    endpoint: str
    username: str
    password: Password | Place | Missing = field(repr=False)
    fixed: tuple[Known, ...]
    search: Search  # for the families that are not fixed
    refresh: float | None
    stop_on_abuse: bool
    fingerprint: str  # of the whole spec
    generation: int | None

    @property
    def title(self) -> str:
        """How messages and events call it."""
        return f"Domain {self.namespace}/{self.name}"

    @property
    def mode(self) -> Literal["Manual", "Dynamic"]:
        """The original's word for whether addresses are looked for."""
        return "Dynamic" if self.search.ipv4 or self.search.ipv6 else "Manual"


class Documents(NamedTuple):
    """What texts hold for DynDNS; `notes` are no faults, but somebody should know."""

    domains: tuple[Domain, ...]
    notes: tuple[Problem, ...]


class _Object(NamedTuple):
    document: Document
    model: DomainDocument | SecretDocument

    @property
    def key(self) -> tuple[str, str]:
        return self.model.metadata.namespace, self.model.metadata.name


_MODELS: Final[Mapping[str, tuple[str, type[DomainDocument | SecretDocument]]]] = {
    "Domain": (f"{GROUP}/{VERSION}", DomainDocument),
    "Secret": ("v1", SecretDocument),
}

_WORDS: Final = (GROUP, *_MODELS)  # a text without them is none of ours, however broken and large it is


def load(texts: Iterable[tuple[str, str]]) -> Documents:
    """Return the domains in some (file, text); DocumentError has every fault of all."""
    problems: list[Problem] = []
    objects: list[_Object] = []
    for file, text in texts:
        if not any(word in text for word in _WORDS):
            continue
        try:
            documents = [part for document in parse(text, file) for part in _flat(document)]
        except DocumentError as error:
            problems += error.problems
            continue
        for document in documents:
            _add(document, objects, problems)
    problems += _twice(objects)
    secrets = {each.key: each.model for each in objects if isinstance(each.model, SecretDocument)}
    found = [(each.document, each.model) for each in objects if isinstance(each.model, DomainDocument)]
    problems += [fault for each in found for fault in _secret_faults(*each, secrets)]
    if problems:
        raise DocumentError(problems)
    notes = [note for each in found for note in _notes(*each, secrets)]
    return Documents(tuple(_domain(model, secrets) for _, model in found), tuple(notes))


def _flat(document: Document) -> Iterator[Document]:
    """Yield the documents in one, Kubernetes lists written out."""
    value = document.value
    if not isinstance(value, dict) or not str(value.get("kind")).endswith("List"):
        yield document
    elif isinstance(items := value.get("items"), list):
        for place in range(len(items)):
            yield from _flat(document.part("items", place))
    else:
        raise DocumentError([document.problem(("items",), "a List holds its objects under items")])


def _add(document: Document, objects: list[_Object], problems: list[Problem]) -> None:
    value = document.value if isinstance(document.value, dict) else {}
    kind, version = value.get("kind"), value.get("apiVersion")
    ours = isinstance(version, str) and version.startswith(GROUP + "/")
    if not isinstance(kind, str) or kind not in _MODELS:
        if ours:
            problems.append(document.problem(("kind",), f"unknown kind {kind!r}; of this group: Domain"))
        return
    expected, model = _MODELS[kind]
    if version != expected:
        problems.append(document.problem(("apiVersion",), f"expected {expected} for the kind {kind}"))
        return
    try:
        objects.append(_Object(document, check(document, model)))
    except DocumentError as error:
        problems += error.problems


def _twice(objects: list[_Object]) -> Iterator[Problem]:
    """Name what has two owners: a host name, or the name of an object."""
    hosts = Counter(_host(each) for each in objects)
    heads = Counter((type(each.model), each.key) for each in objects)
    for each in objects:
        if heads[type(each.model), each.key] > 1:
            message = f"{each.model.kind} {'/'.join(each.key)} stands more than once"
            yield each.document.problem(("metadata", "name"), message)
        host = _host(each)
        if host is not None and hosts[host] > 1:
            message = f"{host} stands in {hosts[host]} Domains: each would undo what the other one does"
            yield each.document.problem(("spec", "fqdn"), message)


def _host(each: _Object) -> str | None:
    return ascii_name(each.model.spec.fqdn) if isinstance(each.model, DomainDocument) else None


_Secrets: TypeAlias = "dict[tuple[str, str], SecretDocument]"


def _secret_key(model: DomainDocument) -> tuple[str, str] | None:
    reference = model.spec.password
    if reference.name is None:
        return None
    return reference.namespace or model.metadata.namespace, reference.name


def _secret_faults(document: Document, model: DomainDocument, secrets: _Secrets) -> Iterator[Problem]:
    key = _secret_key(model)
    secret = secrets.get(key) if key else None
    if key and secret and not secret.password:
        fault = "has no key" if secret.password is None else "has nothing under its key"
        yield document.problem(("spec", "password"), f"the Secret {'/'.join(key)} {fault} {KEY!r}")


def _notes(document: Document, model: DomainDocument, secrets: _Secrets) -> Iterator[Problem]:
    password = _password(model, secrets)
    if isinstance(password, Missing):
        yield document.problem(("spec", "password"), password.reason)


def _password(model: DomainDocument, secrets: _Secrets) -> Password | Place | Missing:
    reference, key = model.spec.password, _secret_key(model)
    if key is not None:
        secret = secrets.get(key)
        return Missing(_absent(model, key, secrets)) if secret is None else secret.password or Password(b"")
    if reference.file is not None:
        return Place("file", reference.file)
    if reference.env is not None:
        return Place("env", reference.env)
    return Place("credential", reference.credential or "")


def _absent(model: DomainDocument, key: tuple[str, str], secrets: _Secrets) -> str:
    own = (model.metadata.namespace, key[1])
    hint = f"; there is one in {own[0]}: leave out password.namespace" if own in secrets else ""
    return f"the Secret {'/'.join(key)} is in no document: the record waits until it is{hint}"


def _domain(model: DomainDocument, secrets: _Secrets) -> Domain:
    spec, hostname = model.spec, ascii_name(model.spec.fqdn)
    return Domain(
        namespace=model.metadata.namespace,
        name=model.metadata.name,
        fqdn=spec.fqdn,
        hostname=hostname,
        enabled=spec.enabled,
        interval=spec.interval * 60.0,
        endpoint=spec.endpoint,
        username=spec.username or hostname,
        password=_password(model, secrets),
        fixed=tuple(_fixed(spec)),
        search=_search(spec),
        refresh=None if spec.refresh_days is None else spec.refresh_days * 86_400.0,
        stop_on_abuse=spec.after_abuse == "stop",
        fingerprint=_fingerprint(spec),
        generation=model.metadata.generation if isinstance(model.metadata.generation, int) else None,
    )


def _fixed(spec: DomainSpec) -> Iterator[Known]:
    if spec.ip_address is not None:
        yield Known(IPv4Address(spec.ip_address).packed, ("ipAddress",))
    if spec.ipv6_address is not None:
        yield Known(IPv6Address(spec.ipv6_address).packed, ("ipv6Address",))


def _search(spec: DomainSpec) -> Search:
    wanted = {family: _wanted(spec, family) for family in spec.managed}
    fewest = min((len(each.sources) for each in wanted.values() if each and each.sources), default=2)
    quorum = spec.quorum or min(2, fewest)
    return Search(wanted.get("ipv4"), wanted.get("ipv6"), quorum, spec.allowed)


def _wanted(spec: DomainSpec, family: FamilyName) -> Wanted | None:
    if family == "ipv4":
        return Wanted(tuple(spec.sources.ipv4)) if spec.ip_address is None else None
    if spec.ipv6_address is not None:
        return None
    bits, _, length = (spec.suffix or "").partition("/")
    suffix = IPv6Address(bits).packed if bits else None
    return Wanted(tuple(spec.sources.ipv6), suffix, int(length or 64))


def _fingerprint(spec: DomainSpec) -> str:
    """Return what tells one spec from another, whatever defaults a later version may add."""
    text = spec.model_dump_json(by_alias=True, exclude_defaults=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()
