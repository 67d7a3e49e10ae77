"""What Cilium's wildcards mean: vectors, and an independent reference made of regular expressions on text."""

from __future__ import annotations

import re

from dnsproxy.names import from_labels

NAME, PATTERN = "matchName", "matchPattern"

# (field, text, name as a user would write it, whether it matches as a toFQDNs entry)
VECTORS = [
    (NAME, "example.com", "example.com", True),
    (NAME, "example.com", "EXAMPLE.com.", True),
    (NAME, "example.com.", "example.com", True),
    (NAME, "example.com", "www.example.com", False),
    (NAME, "example.com", "example.com.evil.test", False),
    (NAME, "example.com", "notexample.com", False),
    (NAME, "example.com", "exampleXcom", False),
    (NAME, "_ldap._tcp.corp.test", "_ldap._tcp.corp.test", True),
    (PATTERN, "example.com", "example.com", True),
    (PATTERN, "*.example.com", "www.example.com", True),
    (PATTERN, "*.example.com", "a-b_c9.example.com", True),
    (PATTERN, "*.example.com", "example.com", False),
    (PATTERN, "*.example.com", "a.b.example.com", False),
    (PATTERN, "*.example.com", "www.example.com.evil.test", False),
    (PATTERN, "*.example.com", "www.exampleXcom", False),
    (PATTERN, "*.example.com", "www.example.comm", False),
    (PATTERN, "*.EXAMPLE.com", "WWW.example.COM", True),
    (PATTERN, "*example.com", "example.com", True),
    (PATTERN, "*example.com", "myexample.com", True),
    (PATTERN, "*example.com", "www.example.com", False),
    (PATTERN, "sub*.example.com", "sub.example.com", True),
    (PATTERN, "sub*.example.com", "sub-eu-1.example.com", True),
    (PATTERN, "sub*.example.com", "xsub.example.com", False),
    (PATTERN, "sub*.example.com", "sub.a.example.com", False),
    (PATTERN, "a*z.example.com", "az.example.com", True),
    (PATTERN, "a*z.example.com", "a-to-z.example.com", True),
    (PATTERN, "a*z.example.com", "a.z.example.com", False),
    (PATTERN, "www.*.example.com", "www.eu.example.com", True),
    (PATTERN, "www.*.example.com", "www.example.com", False),
    (PATTERN, "www.**.example.com", "www.eu.example.com", True),
    (PATTERN, "www.**.example.com", "www.a.b.example.com", False),
    (PATTERN, "*.*.example.com", "a.b.example.com", True),
    (PATTERN, "*.*.example.com", "a.example.com", False),
    (PATTERN, "*.*.example.com", "a.b.c.example.com", False),
    (PATTERN, "**.example.com", "a.example.com", True),
    (PATTERN, "**.example.com", "a.b.c.d.example.com", True),
    (PATTERN, "**.example.com", "example.com", False),
    (PATTERN, "**.example.com", "badexample.com", False),
    (PATTERN, "****.example.com", "a.b.example.com", True),
    (PATTERN, "**example.com", "myexample.com", True),
    (PATTERN, "**example.com", "a.example.com", False),
    (PATTERN, "**.api*.example.com", "x.api-v2.example.com", True),
    (PATTERN, "**.api*.example.com", "api.example.com", False),
    (PATTERN, "**.*.example.com", "a.example.com", False),
    (PATTERN, "**.*.example.com", "a.b.c.example.com", True),
    (PATTERN, "*.com", "example.com", True),
    (PATTERN, "*.com", "www.example.com", False),
    (PATTERN, "*", "anything.at.all.test", True),
    (PATTERN, "*", ".", True),
    (PATTERN, "*.", "anything.test", True),
    (PATTERN, "***", "anything.test", True),
    (PATTERN, "*", "bad name.test", False),
    (PATTERN, "*.example.com", "bad!label.example.com", False),
    (PATTERN, ".", ".", True),
    (PATTERN, ".", "com", False),
    (PATTERN, "*.svc.cluster.test", "api.prod.svc.cluster.test", False),
    (PATTERN, "*.*.svc.cluster.test", "api.prod.svc.cluster.test", True),
]


def wire(name: str) -> bytes:
    """Return the wire form of a name in text that may hold any character but an escaped dot."""
    return from_labels([label.encode() for label in name.lower().removesuffix(".").split(".") if label])


_CHARACTERS = "[-a-zA-Z0-9_]"


def expression(text: str) -> re.Pattern[str]:
    """Return the anchored expression of a pattern as a toFQDNs entry, for canonical text of names."""
    text = text.lower()
    if re.fullmatch(r"\*+\.?", text):
        return re.compile(rf"(?:{_CHARACTERS}+[.])+|[.]")
    text = text if text.endswith(".") else text + "."
    front = re.match(r"\*\*+\.", text)
    body = text[front.end() :] if front else text
    parts = ("[.]" if part == "." else f"{_CHARACTERS}*" if part[0] == "*" else part for part in _parts(body))
    prefix = rf"{_CHARACTERS}+(?:[.]{_CHARACTERS}+)*[.]" if front else ""
    return re.compile(prefix + "".join(parts))


def _parts(body: str) -> list[str]:
    return re.findall(r"\*+|\.|[^*.]+", body)


def reference(text: str, name: str) -> bool:
    """Tell whether a pattern matches a name in canonical text (lower case, final dot, escapes)."""
    return expression(text).fullmatch(name) is not None
