import pytest

from dnsproxy import errors
from dnsproxy.errors import DocumentError, Problem


@pytest.mark.parametrize(
    ("kind", "code"),
    [("DnsproxyError", 1), ("FormError", 1), ("DocumentError", 3), ("NetworkError", 4), ("RightsError", 5),
     ("KernelError", 6), ("SetError", 1)],
)  # fmt: skip
def test_every_error_of_ours_is_in_one_tree_and_has_its_exit_code(kind, code):
    assert issubclass(getattr(errors, kind), errors.DnsproxyError)
    assert getattr(errors, kind).exit_code == code


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Problem("ci.yaml", 3, 7, "spec.allow[0]", "is empty"), "ci.yaml:3:7: spec.allow[0]: is empty"),
        (Problem("ci.yaml", 3, 7, "", "is empty"), "ci.yaml:3:7: is empty"),
        (Problem("ci.yaml", 0, 0, "", "cannot be read"), "ci.yaml: cannot be read"),
    ],
)
def test_a_problem_says_where(problem, text):
    assert str(problem) == text


def test_a_document_error_shows_all_its_problems():
    problems = [Problem("a", 1, 1, "", "x"), Problem("b", 2, 2, "", "y")]
    error = DocumentError(problems)
    assert (str(error), error.problems) == ("a:1:1: x\nb:2:2: y", problems)
