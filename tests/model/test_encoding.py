import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue.model.encoding import MAX_DEPTH, Misfit, checked_text, dumps, loads, plain

# A busy machine is no reason to fail.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
    max_leaves=30,
)


def nested(levels):
    value = 0
    for _ in range(levels):
        value = [value]
    return value


def refusal(value):
    with pytest.raises(Misfit) as caught:
        plain(value)
    return caught.value.where("args")


@patient
@given(JSON)
def test_plain_json_comes_back_as_it_went_in(value):
    text = dumps(plain(value))

    assert loads(text) == value
    assert json.loads(text) == value


def test_a_visible_escape_of_nul_is_text_like_any_other():
    value = {"path": "C:\\u0000\\temp", "\\u0000": "\\\\u0000"}

    assert loads(dumps(plain(value))) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (float("nan"), "args: nan is not JSON"),
        ({"a": [1, float("inf")]}, "args.a[1]: inf is not JSON"),
        ({"a": float("-inf")}, "args.a: -inf is not JSON"),
        ({"a": "x\0y"}, "args.a: contains a NUL character at position 1, which PostgreSQL cannot store"),
        ({"a\0": 1}, r"args['a\x00']: contains a NUL character at position 1"),
        (
            {"items": [{"name": "\ud83d"}]},
            r"args.items[0].name: contains half of a surrogate pair (\ud83d) at position 0",
        ),
        ({1: "a"}, "args[1]: the key is 1 (int), and the keys of a JSON object are strings"),
        ({"a": {None: 1}}, "args.a[None]: the key is None, and the keys of a JSON object are strings"),
        ({"a b": object}, "args['a b']: type is not JSON; annotate the handler with this type"),
        ({"a": {1, 2}}, "args.a: set is not JSON"),
        ({"a": b"x"}, "args.a: bytes is not JSON"),
    ],
)
def test_what_is_not_json_is_refused_with_its_path(value, reason):
    assert refusal(value).startswith(reason)


@pytest.mark.parametrize("sign", [1, -1])
def test_an_integer_that_python_would_not_read_back_is_refused(sign):
    assert refusal({"a": sign * 10**4300}) == "args.a: an integer of more than 4,300 digits"


def test_integers_of_4300_digits_are_kept_exactly():
    value = 10**4300 - 1

    assert loads(dumps(plain(value))) == value


def test_a_hundred_levels_pass_and_one_more_does_not():
    assert plain(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    assert refusal(nested(MAX_DEPTH + 1)).endswith("nested deeper than 100 levels")


def test_a_list_that_contains_itself_is_refused():
    endless = []
    endless.append(endless)

    assert refusal(endless).endswith("nested deeper than 100 levels")


def test_a_path_of_a_hundred_steps_is_cut():
    assert len(refusal(nested(MAX_DEPTH + 1))) < 160


def test_tuples_become_arrays_and_subclasses_their_plain_value():
    class Name(str):
        __slots__ = ()

    class Number(int):
        pass

    value = plain({"pair": (1, 2), Name("key"): Name("value"), "number": Number(3)})

    assert value == {"pair": [1, 2], "key": "value", "number": 3}
    assert {type(part) for part in (*value, value["key"], value["number"])} == {str, int}


@pytest.mark.parametrize("text", ["[" * 100_000 + "]" * 100_000, "1" * 5000, "{", "nope"])
def test_what_python_cannot_read_is_a_misfit_not_a_crash(text):
    with pytest.raises(Misfit, match="Python"):
        loads(text)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("", "queue must be a text that is not empty, not ''"),
        (None, "queue must be a text that is not empty, not None"),
        (7, "queue must be a text that is not empty, not 7"),
        ("a\0", "queue contains a NUL character at position 1, which PostgreSQL cannot store"),
        ("\ud800", r"queue contains half of a surrogate pair \(\\ud800\) at position 0"),
        ("é" * 51, r"queue has 102 bytes, at most 100 fit"),
    ],
)
def test_a_name_that_the_database_would_not_take_is_refused(value, reason):
    with pytest.raises(ValueError, match=reason):
        checked_text("queue", value, 100)


def test_a_name_is_measured_in_bytes():
    assert checked_text("queue", "é" * 50, 100) == "é" * 50
