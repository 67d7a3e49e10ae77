"""YAML text -> plain values that remember where they stood; a fault as file:line:column, path, expectation.

libyaml composes the nodes (fast, and bounded: it refuses to nest deeper than 1,000), the values are made
here. That is a page of code instead of PyYAML's constructors, and it buys four things: every value keeps
its mark; a key that stands twice is an error and not a silent loss; an alias bomb is counted before
anything walks it; and plain scalars mean what they mean in YAML 1.2 (true, false, null, decimal numbers),
so that the names `no` and `on`, the text `22:22` and the port `0443` stay text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from dnsproxy.errors import DocumentError, Problem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Path: TypeAlias = tuple[str | int, ...]
Step: TypeAlias = tuple[yaml.Node, yaml.Node]  # where something is named, and what stands there
M = TypeVar("M", bound=BaseModel)

MAX_DEPTH = (
    64  # levels of nesting; Kubernetes documents need about 15, our recursion must end before Python's
)
MAX_VALUES = (
    1_000_000  # values of one document with every alias written out; 10,000 patterns need some 40,000
)

_PLAIN, _TEXT = "plain", "tag:yaml.org,2002:str"
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,17})").fullmatch
_FLOAT = re.compile(r"[-+]?(?:[0-9]{1,17}\.[0-9]{0,17}|\.[0-9]{1,17})(?:[eE][-+]?[0-9]{1,3})?").fullmatch
_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_TAGGED = "a tag (!...) is not used here: remove it, or write a value that starts with ! in quotes"
_BARE_KEY = re.compile(r"[A-Za-z_][-\w]*").fullmatch


class Model(BaseModel):
    """The base of every document model: unknown keys are faults, and nothing is converted by guess."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FaultError(ValueError):
    """A validator's complaint about the value at `path` below the one that it validates."""

    def __init__(self, message: str, *path: str | int) -> None:
        super().__init__(message)
        self.path = path


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """One YAML document, or a part of one that stands `at` a path inside it."""

    file: str
    value: Any
    node: yaml.Node
    at: Path = ()
    index: dict[int, dict[str, Step]] = field(default_factory=dict, repr=False)

    def where(self, path: Path, *, key: bool = False) -> tuple[int, int]:
        """Return line and column (from 1) of the value at `path`, or of its key.

        Where a part of the path is missing, of the nearest value above.
        """
        node = spot = self.node
        for part in path:
            step = self._step(node, part)
            if step is None:
                break
            spot, node = step
        mark = (spot if key else node).start_mark
        return mark.line + 1, mark.column + 1

    def problem(self, path: Path, message: str, *, key: bool = False) -> Problem:
        """Return a Problem with the value at `path` (or with its key)."""
        return Problem(self.file, *self.where(path, key=key), path_text(self.at + path), message)

    def part(self, *path: str | int) -> Document:
        """Return the value at `path` as a document of its own."""
        node, value = self.node, self.value
        for part in path:
            step = self._step(node, part)
            if step is None:
                raise KeyError(path)
            node, value = step[1], value[part]
        return Document(self.file, value, node, self.at + path, self.index)

    def _step(self, node: yaml.Node, part: str | int) -> Step | None:
        """Return where `part` is named (its key, or the list item itself) and the node that it leads to."""
        if isinstance(node, yaml.MappingNode):
            return self._keys(node).get(str(part))
        if isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value):
            return node.value[part], node.value[part]
        return None

    def _keys(self, node: yaml.MappingNode) -> dict[str, Step]:
        """Return a mapping's entries by key, made once: a mapping may have as many faults as it has keys."""
        if id(node) not in self.index:
            self.index[id(node)] = {key.value: (key, value) for key, value in node.value}
        return self.index[id(node)]


def path_text(path: Path) -> str:
    """Return a path as people write it: `spec.allow[0].ports[1]`, `metadata.labels["a/b"]`."""
    return "".join(map(_part_text, path)).removeprefix(".")


def _part_text(part: str | int) -> str:
    if isinstance(part, int):
        return f"[{part}]"
    return f".{part}" if _BARE_KEY(part) else f'["{part}"]'


# --- text to documents


class _Composer(yaml.CSafeLoader):
    """Composes nodes and leaves the meaning of plain scalars to us."""

    def resolve(self, kind: type, value: str, implicit: tuple[bool, bool]) -> str:  # noqa: ARG002 - PyYAML's signature
        return _PLAIN if kind is yaml.ScalarNode and implicit[0] else _TEXT

    def descend_resolver(self, parent: object, index: object) -> None:
        """Skip PyYAML's path resolvers."""

    def ascend_resolver(self) -> None:
        """Skip PyYAML's path resolvers."""


def parse(text: str, file: str) -> list[Document]:
    """Return the documents of a YAML text, empty ones left out; DocumentError with every fault found."""
    problems: list[Problem] = []
    documents = []
    try:
        for node in _compose(text):
            build = _Builder(file, problems)
            value, size = build.value(node, 0)
            if size > MAX_VALUES:
                build.refuse(node, f"more than {MAX_VALUES:,} values once its aliases are written out")
            elif value is not None:
                documents.append(Document(file, value, node))
    except yaml.MarkedYAMLError as error:
        problems.append(_broken(file, error))
    except (yaml.reader.ReaderError, UnicodeEncodeError) as error:
        problems.append(_unreadable(file, text, error))
    if problems:
        raise DocumentError(problems)
    return documents


def _compose(text: str) -> Iterator[yaml.Node]:
    loader = _Composer(text)
    try:
        while loader.check_node() and (node := loader.get_node()) is not None:
            yield node
    finally:
        loader.dispose()


def _broken(file: str, error: yaml.MarkedYAMLError) -> Problem:
    mark = error.problem_mark or error.context_mark
    context = f" ({error.context})" if error.context else ""
    hint = _hint(error)
    line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
    return Problem(file, line, column, "", f"not YAML: {error.problem}{context}{hint}")


def _hint(error: yaml.MarkedYAMLError) -> str:
    if "start any token" in (error.problem or ""):
        return ": indent with spaces, not tabs"
    if "alias" in (error.context or ""):
        return ': a star at the start of a value is YAML\'s; write it in quotes, such as "*.example.com"'
    return ""


def _unreadable(file: str, text: str, error: yaml.reader.ReaderError | UnicodeEncodeError) -> Problem:
    at = error.start if isinstance(error, UnicodeEncodeError) else error.position
    before = text[:at]
    line, column = before.count("\n") + 1, at - before.rfind("\n")
    return Problem(file, line, column, "", "not YAML: a control character or a broken one stands here")


class _Builder:
    """Makes values from the nodes of one document, each shared node once."""

    def __init__(self, file: str, problems: list[Problem]) -> None:
        self.file = file
        self.problems = problems
        self.done: dict[int, tuple[Any, int] | None] = {}

    def value(self, node: yaml.Node, depth: int) -> tuple[Any, int]:
        """Return the node's value, and of how many values it consists with aliases written out."""
        if isinstance(node, yaml.ScalarNode):
            return self.scalar(node), 1
        if id(node) in self.done:
            return self.again(node)
        self.done[id(node)] = None  # in the making: who comes here again stands inside itself
        made: tuple[Any, int] = (None, 1)
        if depth >= MAX_DEPTH:
            self.refuse(node, f"nested deeper than {MAX_DEPTH} levels")
        elif node.tag != _TEXT:
            self.refuse(node, _TAGGED)
        elif isinstance(node, yaml.SequenceNode):
            made = self.sequence(node, depth + 1)
        elif isinstance(node, yaml.MappingNode):
            made = self.mapping(node, depth + 1)
        self.done[id(node)] = made
        return made

    def again(self, node: yaml.Node) -> tuple[Any, int]:
        made = self.done[id(node)]
        if made is None:
            self.refuse(node, "an alias stands inside the value that it stands for")
        return made or (None, 1)

    def sequence(self, node: yaml.SequenceNode, depth: int) -> tuple[list[Any], int]:
        made = [self.value(child, depth) for child in node.value]
        return [value for value, _ in made], 1 + sum(size for _, size in made)

    def mapping(self, node: yaml.MappingNode, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        total = 1
        for key, child in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                self.refuse(key, "a key is one word here: no merge key (<<), list or mapping; write it out")
                continue
            if key.value in values:
                self.refuse(key, f"the key {key.value!r} stands twice in this mapping")
            values[key.value], size = self.value(child, depth)
            total += size
        return values, total

    def scalar(self, node: yaml.ScalarNode) -> Any:  # noqa: ANN401 - any plain value
        if node.tag == _PLAIN:
            return _plain(node.value)
        if node.tag != _TEXT:
            self.refuse(node, _TAGGED)
        return node.value

    def refuse(self, node: yaml.Node, message: str) -> None:
        mark = node.start_mark
        self.problems.append(Problem(self.file, mark.line + 1, mark.column + 1, "", message))


def _plain(text: str) -> Any:  # noqa: ANN401 - any plain value
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER(text):
        return int(text)
    return float(text) if _FLOAT(text) else text


# --- documents to checked models

_EXPECTED = {
    **dict.fromkeys(("string_type", "string_sub_type"), "text"),
    **dict.fromkeys(("int_type", "int_from_float"), "a whole number"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), "a mapping"),
    "float_type": "a number",
    "bool_type": "true or false",
    "none_required": "nothing",
}
_KINDS = {type(None): "nothing", bool: "true or false", int: "a number", float: "a number", str: "text",
          list: "a list", dict: "a mapping"}  # fmt: skip


def check(document: Document, model: type[M]) -> M:
    """Return the document as `model`; DocumentError with every fault at its place."""
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        problems = [_problem(document, model, fault) for fault in error.errors(include_url=False)]
        raise DocumentError(sorted(problems, key=lambda each: (each.line, each.column))) from None


def _problem(document: Document, model: type[BaseModel], fault: Any) -> Problem:  # noqa: ANN401 - pydantic's ErrorDetails
    kind = fault["type"]
    path = _path(document.value, fault["loc"], absent=kind == "missing")
    if kind == "extra_forbidden":
        return document.problem(path, _unknown_key(model, path), key=True)
    error = fault.get("ctx", {}).get("error")
    return document.problem(path + getattr(error, "path", ()), _message(fault))


def _path(value: Any, loc: tuple[Any, ...], *, absent: bool) -> Path:  # noqa: ANN401 - any plain value
    """Return a pydantic location without the tags of unions, which no reader has written."""
    path: list[str | int] = []
    for place, part in enumerate(loc, 1):
        if (isinstance(value, dict) and part in value) or (isinstance(value, list) and isinstance(part, int)):
            value = value[part]
            path.append(part)
        elif absent and place == len(loc):
            path.append(part)
    return tuple(path)


def _message(fault: Any) -> str:  # noqa: ANN401 - pydantic's ErrorDetails
    kind, context = fault["type"], fault.get("ctx", {})
    if kind in _EXPECTED:
        found = _KINDS.get(type(fault["input"]), "something else")
        quotes = (
            ": write it in quotes"
            if _EXPECTED[kind] == "text" and isinstance(fault["input"], int | float)
            else ""
        )
        return f"expected {_EXPECTED[kind]}, found {found}{quotes}"
    if kind in _MESSAGES:
        return _MESSAGES[kind](context)
    return str(fault["msg"]).removeprefix("Input ")


def _too_short(context: dict[str, Any]) -> str:
    if not context.get("actual_length"):
        return "empty: at least one entry is needed"
    return f"too short: at least {context['min_length']} are needed"


_MESSAGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "missing": lambda _: "required, but missing",
    "literal_error": lambda context: f"expected {context['expected']}",
    "enum": lambda context: f"expected {context['expected']}",
    "value_error": lambda context: str(context["error"]),
    "too_short": _too_short,
    "too_long": lambda context: f"too long: at most {context['max_length']} are allowed",
    "greater_than": lambda context: f"expected more than {context['gt']:g}",
    "greater_than_equal": lambda context: f"expected {context['ge']:g} or more",
    "less_than": lambda context: f"expected less than {context['lt']:g}",
    "less_than_equal": lambda context: f"expected {context['le']:g} or less",
    "finite_number": lambda _: "expected a finite number",
}


def _unknown_key(model: type[BaseModel], path: Path) -> str:
    key, known = str(path[-1]), sorted(_known(model, path[:-1]))
    from difflib import get_close_matches  # noqa: PLC0415 - half a MB, for a text with a fault

    close = get_close_matches(key, known, 1) or get_close_matches(key.lower(), known, 1)
    hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(known)}"
    return f"unknown key {key!r}: {hint}"


def _known(annotation: Any, path: Path) -> set[str]:  # noqa: ANN401 - any type annotation
    """Return the keys that models at `path` below a type know."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = {field.alias or name: field.annotation for name, field in annotation.model_fields.items()}
        return _known(fields.get(str(path[0])), path[1:]) if path else set(fields)
    inside = path[1:] if path and isinstance(path[0], int) else path
    return {key for argument in get_args(annotation) for key in _known(argument, inside)}
