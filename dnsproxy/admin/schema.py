"""What the admin API takes and gives, as models: they check parameters and make the OpenAPI document.

Rows are made in `views.py` and `why.py` as plain dicts and never pass through these models while running; a
test validates every kind of row. Keys have hyphens where Cilium's have (`endpoint-id`).
"""

from __future__ import annotations

from ipaddress import ip_network
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema

from dnsproxy.rules.pattern import match_pattern

if TYPE_CHECKING:
    from dnsproxy.addresses import Network

Schema: TypeAlias = dict[str, Any]

_LABEL = "[-A-Za-z0-9_*]+"


class Model(BaseModel):
    """An object without any other keys than these."""

    model_config = ConfigDict(extra="forbid", alias_generator=lambda name: name.replace("_", "-"))


def _cidr(text: object) -> Network:
    try:
        return ip_network(str(text), strict=False)
    except ValueError:
        raise ValueError(f"{text!r} is not an address or a range, such as 192.0.2.0/24 or fd00::/8") from None


# -- parameters ---------------------------------------------------------------------------------------------

Pattern = Annotated[
    Any,
    PlainValidator(lambda text: match_pattern(str(text))),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 255,
            "pattern": rf"^(\.|{_LABEL}(\.{_LABEL})*\.?)$",
            "description": "names, as in a matchPattern: `*` inside a label, `**.` in front for whole labels",
        }
    ),
]
Cidr = Annotated[
    Any,
    PlainValidator(_cidr),
    WithJsonSchema({"type": "string", "format": "cidr", "description": "an address or a range of addresses"}),
]
Endpoint = Annotated[
    str, Field(min_length=1, max_length=512, description="`namespace/name`, or a name that only one has")
]
Source = Annotated[
    Literal["lookup", "connection", "global"],
    Field(description="leases, connections after the lease, or the cache of all endpoints together"),
]


class NoQuery(Model):
    """No parameters."""


class EndpointQuery(Model):
    """What is of one endpoint."""

    endpoint: Endpoint | None = None


class LookupsQuery(EndpointQuery):
    """Which lookups to list."""

    matchpattern: Pattern | None = None
    cidr: Cidr | None = None
    source: Source | None = None


class CleanQuery(EndpointQuery):
    """What to force out; `dry-run` lists it and does nothing.

    Leases end. An address past its lease stays while connections may use it, unless `connections` are to be
    cut as well.
    """

    matchpattern: Pattern
    dry_run: Annotated[
        Literal["true", "false"], Field(description="list what would go, and leave it alone")
    ] = "false"
    connections: Annotated[
        Literal["true", "false"], Field(description="also take addresses away that connections may use")
    ] = "false"


class EventsQuery(EndpointQuery):
    """Which events to show."""

    name: Pattern | None = None
    verdict: Annotated[
        Literal["allowed", "denied", "failed"],
        Field(description="allowed requests and their responses, denied requests, or responses that failed"),
    ] | None = None  # fmt: skip


# -- answers ------------------------------------------------------------------------------------------------

Count = Annotated[int, Field(ge=0)]
Time = AwareDatetime | None


class Error(Model):
    """What went wrong, as a sentence for a person; `faults` are those of files."""

    error: str
    faults: list[str] | None = None


Connection = Literal["idle", "new", "recent", "live", "unobserved"]


class Lookup(Model):
    """A lookup with the addresses that it serves; or (`connection`) one address that a connection keeps.

    `connection` is the state of that, null for a lookup. Of a connection, `expiration-time` is when it is
    looked for next, or the end where connections cannot be seen (`unobserved`).
    """

    endpoint_id: str
    source: Literal["lookup", "connection", "global"]
    fqdn: str
    ttl: Count
    lookup_time: Time
    expiration_time: Time
    ips: list[str]
    connection: Connection | None


class Cleaned(Model):
    """How many pairs of name and address were forced out."""

    pairs: Count


class EndpointRow(Model):
    """An endpoint, and how much it has learned."""

    endpoint_id: str
    labels: dict[str, str]
    addresses: list[str]
    deny: Literal["nxdomain", "refused"] | None
    restricted: bool
    names: Count
    ips: Count
    zombies: Count
    evicted: Count


class Rule(Model):
    """One entry of a document. `ports` null: every port; or, of `resolve`, whichever the query came to."""

    policy: str
    path: str
    text: str
    at: str
    kind: Literal["resolve", "connect", "deny"]
    ports: list[str] | None
    sets: list[str]
    cidrs: list[str]


class RuleRow(Rule):
    """A rule, and how many endpoints it is for."""

    endpoints: Count


class EndpointDetail(EndpointRow):
    """An endpoint with its rules and sets."""

    rules: list[RuleRow]
    sets: list[str]


class CiliumSelector(Model):
    """A selector in Cilium's words."""

    model_config = ConfigDict(alias_generator=None)
    selectorString: str  # noqa: N815 - Cilium's word
    regexString: str  # noqa: N815


class CiliumNames(Model):
    """The answer of Cilium's GET /fqdn/names; the first list is never filled."""

    model_config = ConfigDict(alias_generator=None)
    DNSPollNames: None
    FQDNPolicySelectors: list[CiliumSelector]


class Selector(Model):
    """A selector, and how much in the endpoints' caches it matches; a name counts once per endpoint."""

    selector: str
    names: Count
    ips: Count
    endpoints: Count


class SetBase(Model):
    """A set; `endpoint-id` is empty for one that rules name or that is the user's.

    One that is not `enforced` is only shown, and does not exist in the kernel.
    """

    set: str
    endpoint_id: str
    ours: bool
    enforced: bool


class SetRow(SetBase):
    """`missing` elements are wanted and not applied, `extra` ones the other way round."""

    wanted: Count
    applied: Count
    missing: Count
    extra: Count
    failing: str | None


class Example(Model):
    """An element in which the kernel and the proxy differ."""

    element: str
    problem: Literal["missing", "extra"]
    name: str


class Verified(SetBase):
    """A set as it was read back, against what counts as applied."""

    kernel: Count
    applied: Count
    missing: Count
    extra: Count
    examples: list[Example]
    error: str | None


class Resynced(Model):
    """A repair that was done."""

    repaired: bool
    problem: str | None
    drift: Annotated[Count, Field(description="elements that others had taken or added")]


class Zombie(Model):
    """An address past its lease. `names` are the first of `names-total`; the serials are those of passes.

    `expiration-time` is when its connections are looked for next, or its end where they cannot be seen.
    """

    endpoint_id: str
    ip: str
    names: list[str]
    names_total: Count
    state: Connection
    alive_at: Time
    delete_pending_at: Time
    expiration_time: Time
    since_pass: Count
    seen_pass: Count


class Element(Model):
    """An element of a set."""

    set: str
    element: str
    name: str


class Departed(Model):
    """What is remembered of an address that is gone."""

    at: Time
    names: list[str]
    cause: str


class Unlearned(Model):
    """An answer with the address, which nothing permitted to be learned."""

    fqdn: str
    at: Time


class WhyLookup(Model):
    """A name that leads to the address, and the rules that open it."""

    fqdn: str
    ttl: Count
    lookup_time: Time
    expiration_time: Time
    expired: bool
    rules: list[Rule]


class WhyEndpoint(Model):
    """What one endpoint has of an address; `lookups` are the first of `lookups-total`."""

    endpoint_id: str
    reason: str
    lookups: list[WhyLookup]
    lookups_total: Count
    zombie: Zombie | None
    elements: list[Element]
    departed: Departed | None
    not_learned: Unlearned | None


class Why(Model):
    """Why an address is open, or is not; `shared` are elements of sets that are no endpoint's."""

    model_config = ConfigDict(alias_generator=lambda name: name.strip("_").replace("_", "-"))
    address: str
    endpoints: list[WhyEndpoint]
    shared: list[Element]
    global_: list[str]


class Note(Model):
    """Something in a document that is not enforced, or cannot do what was probably meant."""

    at: str
    path: str
    message: str


class Policy(Model):
    """What is in force; `faults` are those of files that are not."""

    enforcement: Literal["default", "always"]
    endpoints: Count
    restricted: Count
    selectors: Count
    notes: list[Note]
    faults: dict[str, str]


class Reloaded(Model):
    """A reload that was done."""

    reloaded: Literal[True]
    faults: list[str]


class Conntrack(Model):
    """What is known of the passes over the kernel's connections."""

    observing: bool
    problem: str | None
    begun: Count
    completed: Count
    started_at: Time
    next_at: Time
    seconds: Annotated[float, Field(ge=0, description="that the last one took")]
    entries: Annotated[Count, Field(description="connections that it saw")]
    failures: Annotated[Count, Field(description="that were not completed")]


class Upstream(Model):
    """A server that is asked."""

    server: str
    failures: Count
    usable: bool


class Events(Model):
    """Whether events are recorded, and how many look on."""

    recording: bool
    subscribers: Count


class Reload(Model):
    """The last reload, or the start."""

    succeeded: bool
    at: Time


class Status(Model):
    """The whole state."""

    version: str
    pid: Count
    state: Literal["starting", "enforcing", "not enforcing", "shown, not enforced"]
    problem: str | None
    started_at: Time
    listen: list[str]
    endpoints: Count
    selectors: Count
    names: Count
    ips: Count
    zombies: Count
    queries: dict[str, Count]
    in_flight: Count
    sets: dict[str, Any]
    conntrack: Conntrack
    store: dict[str, Any] | None
    upstreams: list[Upstream]
    faults: dict[str, str]
    reload: Reload
    domains: Domains
    events: Events


class Domain(Model):
    """A DynDNS record as the document that it is; the keys of `spec` and `status` are those of its CRD."""

    api_version: str = Field(alias="apiVersion")
    kind: Literal["Domain"]
    metadata: dict[str, Any]
    spec: dict[str, Any]
    status: dict[str, Any]


class DomainDetail(Domain):
    """A DynDNS record with its last events."""

    events: list[dict[str, Any]]


class Asked(Model):
    """Something that is going to be done."""

    done: Literal[True]


class Domains(Model):
    """How many DynDNS records there are, and what is the matter with which."""

    records: Count
    problems: list[str]


class Live(Model):
    """The process answers."""

    status: Literal["ok"]


class Part(Model):
    """A part that keeps the proxy from being ready."""

    part: str
    reason: str


class Ready(Model):
    """Whether the proxy can do its work."""

    status: Literal["ok", "failing"]
    failing: list[Part]
    notes: Annotated[list[str], Field(description="what to know although it is ready")]


class Document(BaseModel):
    """An OpenAPI document."""

    openapi: str
    info: dict[str, Any]
    paths: dict[str, Any]
    components: dict[str, Any]
