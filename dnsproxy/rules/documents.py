"""The documents that users write: our own, and the door through which all kinds come in.

Ours are short: `Endpoint` says who is asking, `EgressPolicy` what an endpoint may resolve and connect to
(dnsproxy/v1). Cilium's stand in `cilium.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from dnsproxy.errors import DocumentError, Problem
from dnsproxy.rules.cilium import CiliumClusterwideNetworkPolicy, CiliumNetworkPolicy
from dnsproxy.rules.fields import (
    CamelModel,
    KubernetesObject,
    Name,
    NamePattern,
    NativePorts,
    Prefix,
    Selector,
    SetNames,
)
from dnsproxy.rules.pattern import mistaken
from dnsproxy.yamldoc import Document, FaultError, check

if TYPE_CHECKING:
    from dnsproxy.rules.pattern import Pattern


MAX_ENDPOINT_NAME = 128  # it becomes part of the names of sets, which the kernel limits to 255


class EndpointSpec(CamelModel):
    """Where an endpoint's queries come from, and how its denied ones are answered."""

    addresses: list[Prefix] | None = None
    deny_reply: Literal["nxdomain", "refused"] | None = None


class EndpointDocument(KubernetesObject):
    """Somebody who asks, where no orchestrator tells us."""

    spec: EndpointSpec = EndpointSpec()

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(self.metadata.name) > MAX_ENDPOINT_NAME:
            raise FaultError(
                f"an endpoint's name has at most {MAX_ENDPOINT_NAME} characters", "metadata", "name"
            )
        if self.is_host and self.spec.addresses:
            raise FaultError("the host's own addresses are known: leave them out here", "spec", "addresses")
        if not self.is_host and not self.spec.addresses:
            raise FaultError("addresses are required: whose queries does this endpoint stand for?", "spec")
        return self

    @property
    def is_host(self) -> bool:
        """Tell whether this document speaks of the built-in endpoint of the host."""
        return (self.namespace, self.metadata.name) == ("default", "host")


class Resolve(CamelModel):
    """A name that may be asked for."""

    name: Name | None = None
    pattern: NamePattern | None = None
    cnames: bool = False

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:  # noqa: ANN401 - any plain value
        return cls._from_text(value) if isinstance(value, str) else value

    @classmethod
    def _from_text(cls, text: str) -> dict[str, Any]:
        if (wrong := mistaken(text)) is not None:
            raise ValueError(wrong)
        return {"pattern" if "*" in text else "name": text}

    @model_validator(mode="after")
    def _one_name(self) -> Self:
        if (self.name is None) == (self.pattern is None):
            raise ValueError("expected either name or pattern")
        if (wrong := mistaken(self.names.written)) is not None:
            raise ValueError(wrong)
        return self

    @property
    def names(self) -> Pattern:
        """The names that are meant."""
        return self.name or self.pattern  # type: ignore[return-value]  # one of them is there, checked above


class Allow(Resolve):
    """A name that may be asked for, and whose addresses may then be connected to."""

    ports: list[NativePorts] | None = None
    cidrs: list[Prefix] | None = None
    sets: SetNames = Field((), alias="set")

    @classmethod
    def _from_text(cls, text: str) -> dict[str, Any]:
        name, colon, ports = text.partition(":")
        if not colon or mistaken(text, port=True):
            return super()._from_text(text)
        if not ports:
            raise ValueError(f"{text!r} has no port behind its colon: write {name}:443, or {name}")
        return super()._from_text(name) | {"ports": [ports]}


class EgressPolicySpec(CamelModel):
    """Which endpoints, and what they may resolve and connect to."""

    endpoint_selector: Selector
    allow: list[Allow] | None = None
    resolve: list[Resolve] | None = None

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if self.allow is None and self.resolve is None:
            raise ValueError("allow or resolve is required; an empty list (allow: []) allows nothing")
        return self


class EgressPolicy(KubernetesObject):
    """The short form: one line may resolve and connect."""

    spec: EgressPolicySpec


# --- texts to objects

KINDS: dict[str, tuple[str, type[KubernetesObject]]] = {
    "Endpoint": ("dnsproxy/v1", EndpointDocument),
    "EgressPolicy": ("dnsproxy/v1", EgressPolicy),
    "CiliumNetworkPolicy": ("cilium.io/v2", CiliumNetworkPolicy),
    "CiliumClusterwideNetworkPolicy": ("cilium.io/v2", CiliumClusterwideNetworkPolicy),
}
DYNDNS = "dyndns.contrib.strato.com/"  # read, with Secrets, by dyndns/documents.py from the same texts


class Object(NamedTuple):
    """One checked object and the document (or part of one) that it came from."""

    document: Document
    model: KubernetesObject

    @property
    def title(self) -> str:
        """How messages and events call the object: `EgressPolicy default/ci`."""
        model = self.model
        if isinstance(model, CiliumClusterwideNetworkPolicy):
            return f"{model.kind} {model.metadata.name}"
        return f"{model.kind} {model.namespace}/{model.metadata.name}"


def read(document: Document) -> tuple[list[Object], list[Problem]]:
    """Return the objects in a document, Kubernetes lists written out, and notes on what is skipped.

    DocumentError names every fault.
    """
    objects: list[Object] = []
    notes: list[Problem] = []
    problems: list[Problem] = []
    for part in _flat(document):
        kind, version = _head(part)
        if (kind, version) == ("Secret", "v1") or str(version).startswith(DYNDNS):
            continue
        try:
            objects.append(Object(part, _checked(part, kind, version)))
        except DocumentError as error:
            problems += error.problems
    if problems:
        raise DocumentError(problems)
    return objects, notes


def _head(document: Document) -> tuple[object, object]:
    value = document.value if isinstance(document.value, dict) else {}
    return value.get("kind"), value.get("apiVersion")


def _flat(document: Document) -> list[Document]:
    value = document.value
    if not isinstance(value, dict) or not str(value.get("kind")).endswith("List"):
        return [document]
    items = value.get("items")
    if not isinstance(items, list):
        raise DocumentError([document.problem(("items",), "a List holds its objects under items")])
    return [part for place in range(len(items)) for part in _flat(document.part("items", place))]


def _checked(document: Document, kind: object, version: object) -> KubernetesObject:
    known = f"known here: {', '.join(KINDS)}"
    if kind is None:
        raise DocumentError([document.problem((), f"expected an object with apiVersion and kind; {known}")])
    if not isinstance(kind, str) or kind not in KINDS:
        raise DocumentError([document.problem(("kind",), f"unknown kind {kind!r}; {known}")])
    expected, model = KINDS[kind]
    if version != expected:
        raise DocumentError([document.problem(("apiVersion",), f"expected {expected} for the kind {kind}")])
    return check(document, model)
