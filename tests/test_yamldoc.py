from __future__ import annotations

import ast
from pathlib import Path
from typing import Annotated, Literal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import Discriminator, Field, Tag, model_validator

from dnsproxy.errors import DocumentError
from dnsproxy.yamldoc import MAX_DEPTH, Document, FaultError, Model, check, parse, path_text


def value(text):
    (document,) = parse(text, "f")
    return document.value


def problems(call, *arguments):
    with pytest.raises(DocumentError) as raised:
        call(*arguments)
    return [str(problem) for problem in raised.value.problems]


# --- text to values


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1", {"a": 1}), ("a: -7", {"a": -7}), ("a: 1.5", {"a": 1.5}), ("a: .5e3", {"a": 500.0}),
        ("a: true", {"a": True}), ("a: False", {"a": False}), ("a: ~", {"a": None}), ("a:", {"a": None}),
        ("a: '1'", {"a": "1"}), ('a: "true"', {"a": "true"}), ("[a, b]", ["a", "b"]),
        ("a: {b: [1]}", {"a": {"b": [1]}}),
        ("a: |\n  x\n  y\n", {"a": "x\ny\n"}), ("1: x", {"1": "x"}), ("null: x", {"null": "x"}),
    ],
)  # fmt: skip
def test_plain_values(text, expected):
    assert value(text) == expected


@pytest.mark.parametrize(
    "word",
    ["no", "on", "yes", "Off", "y", "0443", "22:22", "1_000", "0x1F", "0o17", "2026-11-30", "1e3", "9" * 30],
)
def test_what_only_older_yaml_converts_stays_text(word):
    assert value(f"a: {word}") == {"a": word}


def test_several_documents_and_empty_ones():
    documents = parse("# nothing\n---\na: 1\n---\n---\nb: 2\n", "f")
    assert [document.value for document in documents] == [{"a": 1}, {"b": 2}]
    assert [document.where(()) for document in documents] == [(3, 1), (6, 1)]
    assert parse("", "f") == []


def test_anchors_and_aliases():
    assert value("a: &x {n: 1}\nb: *x\n") == {"a": {"n": 1}, "b": {"n": 1}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb: [\n", "f:3:1: not YAML: did not find expected node content"),
        ("a: 1\n  b: 2\n", "f:2:4: not YAML: mapping values are not allowed"),
        ("a:\n\t- b\n", "f:2:1: not YAML: found character that cannot start any token"),
        ("a: *nobody\n", "f:1:4: not YAML: found undefined alias"),
        ("a: 1\na: 2\n", "f:2:1: the key 'a' stands twice"),
        ("a: {b: 1, b: 2}\n", "f:1:11: the key 'b' stands twice"),
        ("a: &x [*x]\n", "f:1:4: an alias stands inside the value that it stands for"),
        ("a: !!python/name:os.system x\n",
         "f:1:4: a tag (!...) is not used here"),
        ("a: !x [1]\n", "f:1:4: a tag (!...) is not used here: remove it"),
        ("a: &x {b: 1}\nc: {<<: *x}\n", "f:2:5: a key is one word here: no merge key"),
        ("? [a]\n: 1\n", "f:1:3: a key is one word here"),
        ("a: 1\nb: x\x01y\n", "f:2:5: not YAML: a control character"),
        ("a: \ud800", "f:1:4: not YAML: a control character"),
        ("[" * 2000 + "]" * 2000, "f:1:1001: not YAML: exceeded maximum nesting depth"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
         f"f:1:{MAX_DEPTH + 1}: nested deeper than {MAX_DEPTH} levels"),
    ],
)  # fmt: skip
def test_what_is_refused_and_where(text, expected):
    (found,) = problems(parse, text, "f")
    assert found.startswith(expected)


def test_a_tab_is_explained():
    assert "spaces, not tabs" in problems(parse, "a:\n\t- b\n", "f")[0]


def test_the_deepest_nesting_is_accepted():
    assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH, "f")


def test_every_duplicate_of_all_documents_is_told():
    assert len(problems(parse, "a: 1\na: 2\n---\nb: 1\nb: 2\nb: 3\n", "f")) == 3


def test_an_alias_bomb_is_refused_before_anything_walks_it():
    text = "a0: &a0 [x]\n" + "".join(
        f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 40)
    )
    assert problems(parse, text, "f") == [
        "f:1:1: more than 1,000,000 values once its aliases are written out"
    ]


@given(st.text(max_size=60) | st.text(alphabet="ab:-[]{}&*!|>'\"#%@`,?\n\t 0.~<", max_size=60))
@example("%YAML 3.0\n---\na")
@example("\ufeffa: 1")
def test_any_text_is_documents_or_problems_with_a_place(text):
    try:
        assert all(isinstance(document, Document) for document in parse(text, "f"))
    except DocumentError as error:
        assert all(problem.line >= 1 and problem.column >= 1 for problem in error.problems)  # noqa: PT017


# --- places

NESTED = """\
spec:
  allow:
  - github.com
  - {name: a, ports: [22, 443]}
  rest: &r
    deep: x
also: *r
"""


@pytest.mark.parametrize(
    ("path", "place"),
    [
        ((), (1, 1)), (("spec",), (2, 3)), (("spec", "allow"), (3, 3)), (("spec", "allow", 0), (3, 5)),
        (("spec", "allow", 1, "ports", 1), (4, 27)), (("also", "deep"), (6, 11)),
        (("spec", "nothing"), (2, 3)), (("spec", "allow", 9, "x"), (3, 3)),
        (("spec", "allow", 0, "x"), (3, 5)),
    ],
)  # fmt: skip
def test_where(path, place):
    assert parse(NESTED, "f")[0].where(path) == place


def test_where_the_key_stands():
    assert parse(NESTED, "f")[0].where(("spec", "rest"), key=True) == (5, 3)
    assert parse(NESTED, "f")[0].where(("spec", "allow", 1), key=True) == (4, 5)


def test_a_part_knows_its_value_and_its_place_in_the_whole():
    part = parse(NESTED, "f")[0].part("spec", "allow", 1)
    assert part.value == {"name": "a", "ports": [22, 443]}
    assert str(part.problem(("ports", 0), "wrong")) == "f:4:23: spec.allow[1].ports[0]: wrong"
    with pytest.raises(KeyError):
        part.part("nothing")


def test_path_text():
    assert path_text(("spec", "allow", 0, "ports", 1)) == "spec.allow[0].ports[1]"
    assert path_text(("metadata", "labels", "a/b.c")) == 'metadata.labels["a/b.c"]'
    assert path_text((0, "a")) == "[0].a"


# --- values to models


class Inner(Model):
    port: int
    kind: Literal["a", "b"] = "a"

    @model_validator(mode="after")
    def _not_nine(self):
        if self.port == 9:
            raise FaultError("nine is taken", "port")
        if self.port == 8:
            raise ValueError("eight is odd")
        return self


class Cat(Model):
    purrs: bool


class Dog(Model):
    barks: bool


class Outer(Model):
    name: str
    inner: Inner | None = None
    many: list[Inner] | None = None
    either: str | list[str] = ""
    labels: dict[str, str] | None = None
    small: Annotated[int, Field(le=5)] = 0
    pet: Annotated[
        Annotated[Cat, Tag("cat")] | Annotated[Dog, Tag("dog")],
        Discriminator(lambda value: "cat" if "purrs" in value else "dog"),
    ] = Cat(purrs=True)
    camel: int = Field(0, alias="camelCase")


def checked(text):
    return check(parse(text, "f")[0], Outer)


def test_a_good_document_becomes_its_model():
    outer = checked("name: x\ninner: {port: 1}\nmany: [{port: 2, kind: b}]\neither: [a]\ncamelCase: 3\n")
    assert (outer.name, outer.inner.port, outer.many[0].kind, outer.either, outer.camel) == (
        "x",
        1,
        "b",
        ["a"],
        3,
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("name: 1\n", "f:1:7: name: expected text, found a number: write it in quotes"),
        ("name: [x]\n", "f:1:7: name: expected text, found a list"),
        ("name: ~\n", "f:1:7: name: expected text, found nothing"),
        ("small: 1\n", "f:1:1: name: required, but missing"),
        ("name: x\ninner: 5\n", "f:2:8: inner: expected a mapping, found a number"),
        ("name: x\ninner:\n  kind: a\n", "f:3:3: inner.port: required, but missing"),
        ("name: x\ninner: {port: '1'}\n", "f:2:15: inner.port: expected a whole number, found text"),
        ("name: x\ninner: {port: 1.5}\n", "f:2:15: inner.port: expected a whole number, found a number"),
        ("name: x\ninner: {port: true}\n",
         "f:2:15: inner.port: expected a whole number, found true or false"),
        ("name: x\ninner: {port: 1, kind: c}\n", "f:2:24: inner.kind: expected 'a' or 'b'"),
        ("name: x\ninner: {port: 9}\n", "f:2:15: inner.port: nine is taken"),
        ("name: x\nmany: [{port: 8}]\n", "f:2:8: many[0]: eight is odd"),
        ("name: x\nmany: {}\n", "f:2:7: many: expected a list, found a mapping"),
        ("name: x\nsmall: 6\n", "f:2:8: small: expected 5 or less"),
        ("name: x\nlabels: {a/b: 1}\n",
         'f:2:15: labels["a/b"]: expected text, found a number: write it in quotes'),
        ("name: x\npet: {purrs: 1}\n", "f:2:14: pet.purrs: expected true or false, found a number"),
        ("name: x\ncamelCase: x\n", "f:2:12: camelCase: expected a whole number, found text"),
        ("name: x\npet: {}\n", "f:2:6: pet.barks: required, but missing"),
        ("name: x\nNAME: x\n", "f:2:1: NAME: unknown key 'NAME': did you mean 'name'?"),
        ("[1]\n", "f:1:1: expected a mapping, found a list"),
        ("name: x\nname2: y\n", "f:2:1: name2: unknown key 'name2': did you mean 'name'?"),
        ("name: x\ncamelcase: 1\n", "f:2:1: camelcase: unknown key 'camelcase': did you mean 'camelCase'?"),
        ("name: x\nmany:\n- port: 1\n  prot: 2\n",
         "f:4:3: many[0].prot: unknown key 'prot': did you mean 'port'?"),
        ("name: x\ninner: {port: 1, zzz: 2}\n",
         "f:2:18: inner.zzz: unknown key 'zzz': known here: kind, port"),
        ("name: x\npet: {bark: 1, barks: true}\n",
         "f:2:7: pet.bark: unknown key 'bark': did you mean 'barks'?"),
    ],
)  # fmt: skip
def test_a_fault_says_where_and_what_was_expected(text, expected):
    assert problems(checked, text) == [expected]


def test_a_union_points_at_the_value_and_not_at_its_branches():
    found = problems(checked, "name: x\neither: 5\n")
    assert {line.split(": expected")[0] for line in found} == {"f:2:9: either"}


def test_all_faults_are_told_at_once():
    found = problems(checked, "nme: x\nmany: [{port: a}, {port: 1, prot: 1}]\n")
    assert [line.split(": ")[1] for line in found] == ["name", "nme", "many[0].port", "many[1].prot"]


def test_an_unquoted_star_is_told_how_to_be_written():
    with pytest.raises(DocumentError, match="write it in quotes"):
        parse("allow:\n- *.example.com\n", "p.yaml")


# --- every limit in words of our own


class Limits(Model):
    few: Annotated[list[int], Field(min_length=1, max_length=2)] | None = None
    pair: Annotated[list[int], Field(min_length=2)] | None = None
    over: Annotated[float, Field(gt=0, lt=10, allow_inf_nan=False)] = 1.0
    within: Annotated[int, Field(ge=1, le=64)] = 1


LIMITS = {"min_length", "max_length", "gt", "lt", "ge", "le", "allow_inf_nan"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("few: []", "few: empty: at least one entry is needed"),
        ("few: [1, 2, 3]", "few: too long: at most 2 are allowed"),
        ("pair: [1]", "pair: too short: at least 2 are needed"),
        ("over: 0", "over: expected more than 0"),
        ("over: 10", "over: expected less than 10"),
        ("over: 1.e400", "over: expected a finite number"),
        ("within: 0", "within: expected 1 or more"),
        ("within: 65", "within: expected 64 or less"),
    ],
)
def test_a_limit_is_told_in_words_of_our_own(text, expected):
    (document,) = parse(text, "f")
    (found,) = problems(check, document, Limits)
    assert found.partition(": ")[2] == expected


def test_no_document_has_a_limit_without_words():
    sources = (Path(__file__).parent.parent / "dnsproxy").rglob("*.py")
    calls = [node for source in sources for node in ast.walk(ast.parse(source.read_text()))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "Field"]  # fmt: skip
    used = {keyword.arg for call in calls for keyword in call.keywords}
    assert used & LIMITS
    assert used <= LIMITS | {"alias", "default_factory", "description", "json_schema_extra", "repr"}


class Counted(list):
    """A list that counts how often it is gone through."""

    walks = 0

    def __iter__(self):
        self.walks += 1
        return super().__iter__()


def test_many_faults_in_one_mapping_go_through_it_once():
    (document,) = parse("name: x\n" + "".join(f"wrong{place}: 1\n" for place in range(50)), "f")
    document.node.value = Counted(document.node.value)
    assert len(problems(check, document, Outer)) == 50
    assert document.node.value.walks == 1


@pytest.mark.parametrize(
    "value", ["!geheim", "*geheim", "|geheim", "[geheim", "'geheim", '"\\geheim"', "? geheim"]
)
def test_no_message_quotes_a_value_that_may_be_a_password(value):
    with pytest.raises(DocumentError) as caught:
        parse(f"kind: Secret\nstringData:\n  password: {value}\n", "f")
    assert "geheim" not in str(caught.value)
