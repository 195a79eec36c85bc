from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pgqueue
from pgqueue import JobContext
from pgqueue.errors import ArgumentsTooLarge, ConfigurationError, InvalidArguments
from pgqueue.model.arguments import Signature, plain_args
from pgqueue.model.job import MAX_ARGS_BYTES, MAX_RESULT_BYTES

if TYPE_CHECKING:
    from somewhere import Unknown

# A busy machine is no reason to fail.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


ODD = object()


@dataclass
class Order:
    id: int
    items: list[Item]


@dataclass
class Node:
    value: int
    children: list[Node]


@dataclass
class Item:
    name: str


def signature(function, task="demo"):
    return Signature(task, function)


def send(user_id: int, subject: str = "hi", *, urgent: bool = False) -> None: ...


# Binding.


@pytest.mark.parametrize(
    ("args", "kwargs", "bound"),
    [
        ((7,), {}, {"user_id": 7}),
        ((7, "x"), {}, {"user_id": 7, "subject": "x"}),
        ((), {"user_id": 7, "urgent": True}, {"user_id": 7, "urgent": True}),
        ((7,), {"subject": "x"}, {"user_id": 7, "subject": "x"}),
    ],
)
def test_arguments_are_bound_by_position_and_by_name(args, kwargs, bound):
    assert signature(send).bind(args, kwargs) == bound


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ((), {}, "misses the argument 'user_id'"),
        ((), {"subject": "x"}, "misses the argument 'user_id'"),
        ((7,), {"user": 8}, "takes no argument 'user' (it takes: user_id, subject, urgent)"),
        ((7,), {"user_id": 8}, "the argument 'user_id' was given twice"),
        ((1, 2, 3, 4), {}, "takes 2 arguments by position, 4 were given"),
        ((1, 2, True), {}, "takes 2 arguments by position, 3 were given"),
    ],
)
def test_a_call_that_python_would_refuse_is_refused_at_the_door(args, kwargs, reason):
    with pytest.raises(InvalidArguments) as caught:
        signature(send).bind(args, kwargs)

    assert str(caught.value) == f"task 'demo': {reason}"
    assert (caught.value.task, caught.value.reason) == ("demo", reason)


def test_all_missing_arguments_are_named():
    with pytest.raises(InvalidArguments, match="misses the arguments 'a', 'b'"):
        signature(lambda a, b: None).bind((), {})


def test_defaults_are_left_to_the_handler_that_runs():
    assert signature(send).encode(signature(send).bind((7,), {})) == '{"user_id": 7}'


def test_a_handler_with_keywords_takes_any_name_and_checks_their_type():
    def handler(first: int, **numbers: int) -> None: ...

    demo = signature(handler)

    assert demo.decode(demo.encode(demo.bind((1,), {"a b": 2}))) == {"first": 1, "a b": 2}
    with pytest.raises(InvalidArguments, match=r"args.other: expected an int, got 'x'"):
        demo.encode(demo.bind((1,), {"other": "x"}))
    with pytest.raises(InvalidArguments, match=r"args\['a\\x00'\]: contains a NUL"):
        demo.encode(demo.bind((1,), {"a\0": 1}))


# What a handler may look like.


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda *rest: None, r"\*rest gives its values no names"),
        (lambda first, /: None, "'first' is positional-only"),
        (lambda: (yield), "returns its result, it does not yield"),
        ("send", "a handler is a function, not 'send'"),
    ],
)
def test_a_function_that_cannot_be_called_by_name_is_refused_at_decoration(function, reason):
    with pytest.raises(ConfigurationError, match=reason):
        signature(function)


def test_an_annotation_that_json_cannot_carry_is_refused_at_decoration():
    def handler(stream: Iterator[int]) -> None: ...

    with pytest.raises(ConfigurationError, match="task 'demo': the annotation of 'stream' does not do"):
        signature(handler)


def test_methods_partials_and_callable_objects_are_handlers():
    class Mailer:
        def send(self, user_id: int) -> None: ...

        async def __call__(self, user_id: int) -> None: ...

    bound, called = signature(Mailer().send), signature(Mailer())
    partial = signature(functools.partial(send, subject="fixed"))

    assert (list(bound.arguments), bound.is_async) == (["user_id"], False)
    assert (list(called.arguments), called.is_async) == (["user_id"], True)
    assert partial.encode(partial.bind((), {"user_id": 7})) == '{"user_id": 7}'


def test_a_decorated_function_is_read_through_its_wrapper():
    @functools.wraps(send)
    def wrapper(*args, **kwargs): ...

    assert list(signature(wrapper).arguments) == ["user_id", "subject", "urgent"]


def test_a_type_defined_further_down_is_looked_up_at_first_use():
    def handler(order: LaterOrder) -> None: ...  # noqa: F821  that is the point

    demo = signature(handler)
    globals()["LaterOrder"] = Order

    assert demo.decode('{"order": {"id": 1, "items": [{"name": "a"}]}}') == {"order": Order(1, [Item("a")])}
    del globals()["LaterOrder"]


def test_a_type_that_is_never_there_is_a_clear_error_at_first_use():
    def handler(order: Unknown) -> None: ...

    demo = signature(handler)

    with pytest.raises(ConfigurationError, match=r"annotation of 'order' cannot be read .*'Unknown'"):
        demo.encode({"order": 1})


# Injection.


def test_context_and_connection_are_injected_and_no_arguments():
    def handler(job: JobContext, order_id: int, tx: psycopg.Connection) -> None: ...

    demo = signature(handler)

    assert (demo.context_names, demo.connection_names) == (("job",), ("tx",))
    assert demo.bind((7,), {}) == {"order_id": 7}
    assert list(demo.schema()["properties"]) == ["order_id"]


@pytest.mark.parametrize("name", ["job", "tx"])
def test_what_is_injected_cannot_be_passed(name):
    def handler(order_id: int, job: JobContext, tx: psycopg.Connection) -> None: ...

    with pytest.raises(InvalidArguments, match=f"'{name}' is injected by the worker"):
        signature(handler).bind((7,), {name: 1})


@pytest.mark.parametrize(
    ("annotation", "context", "connection"),
    [
        (JobContext, True, False),
        (JobContext | None, True, False),
        ("pgqueue.JobContext", True, False),
        ("JobContext | None", True, False),
        (pgqueue.JobContext, True, False),
        (psycopg.Connection, False, True),
        (psycopg.Connection[Any], False, True),
        ("psycopg.Connection[tuple[Any, ...]]", False, True),
        ("Connection", False, True),
        (int, False, False),
    ],
)
def test_injection_is_seen_however_the_class_is_written(annotation, context, connection):
    def handler(it=None): ...

    handler.__annotations__ = {"it": annotation}
    demo = signature(handler)

    assert (demo.context_names == ("it",), demo.connection_names == ("it",)) == (context, connection)


def test_a_connection_of_the_wrong_kind_is_refused_at_decoration():
    async def async_handler(tx: psycopg.Connection) -> None: ...

    def sync_handler(tx: psycopg.AsyncConnection) -> None: ...

    with pytest.raises(ConfigurationError, match=r"an async handler cannot use 'tx', a psycopg.Connection"):
        signature(async_handler)
    with pytest.raises(ConfigurationError, match=r"a sync handler cannot use 'tx', a psycopg.AsyncConn"):
        signature(sync_handler)


# To JSON and back.


@patient
@given(st.dictionaries(st.sampled_from("abc"), JSON))
def test_unannotated_arguments_are_plain_json_that_comes_back(values):
    def handler(a=None, b=None, c=None): ...

    demo = signature(handler)

    assert demo.decode(demo.encode(demo.bind((), values))) == values


def test_annotated_arguments_come_back_as_what_they_were():
    def handler(order: Order, at: datetime, tags: set[str] | None = None) -> None: ...

    demo = signature(handler)
    values = {"order": Order(1, [Item("a")]), "at": datetime(2024, 1, 1, tzinfo=UTC), "tags": {"x"}}

    assert demo.decode(demo.encode(demo.bind((), values))) == values


def test_the_text_is_written_as_postgresql_shows_jsonb():
    def handler(a=None, b=None): ...

    text = signature(handler).encode({"a": [1, "é", None], "b": {"c": True}})

    assert text == '{"a": [1, "é", null], "b": {"c": true}}'


def test_a_refused_value_is_named_by_its_path():
    def handler(order: Order) -> None: ...

    with pytest.raises(InvalidArguments) as caught:
        signature(handler).encode({"order": {"id": 1, "items": [{"name": "a"}, {"name": "x\0"}]}})

    assert "args.order.items[1].name: contains a NUL character at position 1" in str(caught.value)


def test_a_value_that_only_an_annotation_converts_says_so():
    with pytest.raises(InvalidArguments, match=r"args.at: date is not JSON; annotate the handler"):
        signature(lambda at: None).encode({"at": date(2024, 1, 1)})


def test_arguments_of_one_mebibyte_fit_and_one_byte_more_does_not():
    demo = signature(lambda text: None)
    fits = "é" * ((MAX_ARGS_BYTES - len('{"text": ""}')) // 2)

    assert len(demo.encode({"text": fits}).encode()) == MAX_ARGS_BYTES
    with pytest.raises(ArgumentsTooLarge) as caught:
        demo.encode({"text": fits + "x"})

    assert (caught.value.size_bytes, caught.value.max_bytes) == (1_048_577, 1_048_576)
    assert "the arguments are 1,048,577 bytes, a job carries at most 1,048,576" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[1]", "the arguments are no JSON object: [1]"),
        ("null", "the arguments are no JSON object: null"),
        ('{"user_id": "7"}', "args.user_id: expected an int, got '7' (str)"),
        ('{"user_id": null}', "args.user_id: expected an int, got None"),
        ("{}", "misses the argument 'user_id'"),
        ('{"user_id": 1, "old": 2}', "takes no argument 'old' (it takes: user_id, subject, urgent)"),
        ('{"user_id": ' + "1" * 5000 + "}", "args: not JSON that Python reads"),
        ('{"user_id": ' + "[" * 50_000 + "]" * 50_000 + "}", "args: nested too deeply for Python to read"),
    ],
    ids=lambda value: value[:40],
)
def test_what_a_worker_cannot_hand_to_the_handler_is_refused(text, reason):
    with pytest.raises(InvalidArguments) as caught:
        signature(send).decode(text)

    assert caught.value.reason.startswith(reason)


def test_a_document_too_deep_for_its_own_type_is_refused_too():
    def handler(node: Node) -> None: ...

    text = '{"value": 0, "children": [' * 400 + "]}" * 400

    with pytest.raises(InvalidArguments, match="args: nested too deeply for Python to read"):
        signature(handler).decode(f'{{"node": {text}}}')


def test_thirty_digits_written_by_another_language_stay_exact():
    number = 123_456_789_012_345_678_901_234_567_890

    assert signature(lambda n: None).decode(f'{{"n": {number}}}') == {"n": number}


def test_plain_arguments_of_a_task_that_is_elsewhere_are_checked_too():
    assert plain_args("demo", {"a": 1}) == '{"a": 1}'
    with pytest.raises(InvalidArguments, match=r"task 'demo': args.a\[0\]: nan is not JSON"):
        plain_args("demo", {"a": [float("nan")]})
    with pytest.raises(InvalidArguments, match="the arguments are a list, not a dict by name"):
        plain_args("demo", [1])


# Results.


def test_a_result_comes_back_by_the_return_annotation():
    def handler() -> dict[str, datetime]: ...

    demo = signature(handler)
    value = {"at": datetime(2024, 1, 1, tzinfo=UTC)}

    text, note = demo.encode_result(value)

    assert (demo.decode_result(text), note) == (value, None)


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (float("nan"), "result: nan is not JSON"),
        ({"a": [object]}, "result.a[0]: type is not JSON"),
        ("x" * MAX_RESULT_BYTES, "result: 1,048,578 bytes, at most 1,048,576 are kept"),
    ],
)
def test_a_result_that_cannot_be_kept_does_not_undo_the_work(value, note):
    text, why = signature(lambda: None).encode_result(value)

    assert text is None
    assert why.startswith(note)


def test_a_result_whose_own_code_fails_does_not_undo_the_work():
    class Broken:
        @classmethod
        def model_validate_json(cls, text): ...

        def model_dump(self, **options):
            raise ZeroDivisionError

    def handler(): ...

    handler.__annotations__ = {"return": Broken}

    assert signature(handler).encode_result(Broken()) == (
        None,
        "result: ZeroDivisionError while it was written as JSON",
    )


def test_a_return_annotation_that_json_cannot_carry_is_no_reason_to_refuse_the_handler():
    def handler() -> Iterator[int]: ...

    assert signature(handler).encode_result([1]) == ("[1]", None)


# For the database.


def test_the_schema_has_types_defaults_and_what_is_required():
    def handler(
        order_id: int, tenant: str = "acme", at: date = date(2024, 1, 1), odd: Any = ODD, **more: Any
    ) -> None: ...

    schema = signature(handler).schema()

    assert json.loads(json.dumps(schema)) == {
        "type": "object",
        "properties": {
            "order_id": {"type": "integer"},
            "tenant": {"type": "string", "default": "acme"},
            "at": {"type": "string", "format": "date", "default": "2024-01-01"},
            "odd": {},
        },
        "required": ["order_id"],
        "additionalProperties": True,
    }


@dataclass
class Listed:
    path: str

    def __post_init__(self) -> None:
        if not self.path.isascii():
            raise ValueError(f"odd path {self.path}")


def test_why_a_result_was_not_kept_can_be_stored() -> None:
    def look() -> Listed: ...

    text, note = signature(look).encode_result({"path": os.fsdecode(b"caf\xe9 \x00")})

    assert text is None
    assert note is not None
    assert "\x00" not in note
    assert "odd path" in note.encode().decode()
