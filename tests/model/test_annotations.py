import collections.abc
import dataclasses
import json
import typing
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum, StrEnum
from typing import Annotated, Any, Literal, NamedTuple, NewType, Required, TypedDict
from uuid import UUID
from zoneinfo import ZoneInfo

import pydantic
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pgqueue.model.annotations import codec_for
from pgqueue.model.encoding import Misfit, dumps, loads


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Size(IntEnum):
    SMALL = 1
    LARGE = 2


class Mood(StrEnum):
    GOOD = "good"


class Shape(Enum):
    POINT = (0, 0)
    LINE = 1


class Right(Flag):
    READ = 1
    WRITE = 2


@dataclasses.dataclass(frozen=True)
class Item:
    name: str
    price: Decimal = Decimal(0)


@dataclasses.dataclass
class Order:
    id: UUID
    items: list[Item]
    placed_at: datetime
    total: Decimal = dataclasses.field(init=False, default=Decimal(1))


@dataclasses.dataclass
class Node:
    value: int
    children: "list[Node]" = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Even:
    number: int

    def __post_init__(self):
        if self.number % 2:
            raise KeyError("odd")


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Movie(TypedDict, total=False):
    title: Required[str]
    released: date


class Model(pydantic.BaseModel):
    at: datetime
    tags: set[str] = set()
    alias: int = pydantic.Field(1, alias="theAlias")

    @pydantic.computed_field
    @property
    def shout(self) -> str:
        return "not an input"


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True, extra="forbid")
    at: datetime
    raw: bytes


UserId = NewType("UserId", int)

DATETIMES = st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=5, minutes=30))))
# A busy machine is no reason to fail.
patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
FINITE = st.floats(allow_nan=False, allow_infinity=False)
VALUES = {
    int: st.integers(),
    float: FINITE,
    bool: st.booleans(),
    str: TEXT,
    None: st.none(),
    bytes: st.binary(),
    datetime: DATETIMES,
    date: st.dates(),
    time: st.times(),
    timedelta: st.timedeltas(timedelta(days=-9000), timedelta(days=9000)),
    UUID: st.uuids(),
    Decimal: st.decimals(allow_nan=False, allow_infinity=False),
    Colour: st.sampled_from(Colour),
    Size: st.sampled_from(Size),
    Mood: st.sampled_from(Mood),
    Shape: st.sampled_from(Shape),
    Right: st.sampled_from([Right(0), Right.READ, Right.READ | Right.WRITE]),
    UserId: st.integers(),
    Annotated[int, "positive"]: st.integers(),
    Literal["a", 1, True]: st.sampled_from(["a", 1, True]),
    Point: st.builds(Point, FINITE, FINITE),
    Movie: st.fixed_dictionaries({"title": TEXT}, optional={"released": st.dates()}),
    Item: st.builds(Item, TEXT, st.decimals(allow_nan=False, allow_infinity=False)),
    Order: st.builds(Order, st.uuids(), st.lists(st.builds(Item, TEXT), max_size=3), DATETIMES),
    list[datetime]: st.lists(DATETIMES),
    tuple[int, str]: st.tuples(st.integers(), TEXT),
    tuple[UUID, ...]: st.lists(st.uuids()).map(tuple),
    set[int]: st.sets(st.integers()),
    frozenset[date]: st.frozensets(st.dates()),
    dict[str, Decimal]: st.dictionaries(TEXT, st.decimals(allow_nan=False, allow_infinity=False)),
    dict[int, bytes]: st.dictionaries(st.integers(), st.binary()),
    dict[UUID, list[Point]]: st.dictionaries(
        st.uuids(), st.lists(st.builds(Point, FINITE, FINITE), max_size=2)
    ),
    dict[Size, int]: st.dictionaries(st.sampled_from(Size), st.integers()),
    collections.abc.Sequence[int]: st.lists(st.integers()),
    collections.abc.Mapping[date, int]: st.dictionaries(st.dates(), st.integers()),
    int | None: st.integers() | st.none(),
    int | float: st.integers() | FINITE.filter(lambda number: not number.is_integer()),
    datetime | int | None: DATETIMES | st.integers() | st.none(),
    Item | Point: st.builds(Item, TEXT) | st.builds(Point, FINITE, FINITE),
    list[int] | str: st.lists(st.integers()) | TEXT,
}


@pytest.mark.parametrize("annotation", VALUES, ids=str)
@settings(patient, max_examples=30)
@given(data=st.data())
def test_a_value_comes_back_as_it_went_in(annotation, data):
    codec = codec_for(annotation)
    value = data.draw(VALUES[annotation])

    text = dumps(codec.encode(value))
    decoded = codec.decode(loads(text))

    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize("annotation", VALUES, ids=str)
@settings(patient, max_examples=10)
@given(data=st.data())
def test_the_json_form_of_a_value_is_taken_for_it(annotation, data):
    codec = codec_for(annotation)
    written = json.loads(dumps(codec.encode(data.draw(VALUES[annotation]))))

    again = codec.encode(written)

    assert json.loads(dumps(again)) == written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (datetime(2024, 5, 1, 12, tzinfo=UTC), '"2024-05-01T12:00:00+00:00"'),
        (timedelta(minutes=1), "60"),
        (timedelta(milliseconds=1500), "1.5"),
        (Decimal("1.10"), '"1.10"'),
        (b"\x00\xff", '"AP8="'),
        (Colour.RED, '"red"'),
        (Shape.POINT, '"POINT"'),
        (Point(1, 2), '{"x": 1.0, "y": 2.0}'),
        ({"b", "a"}, '["a", "b"]'),
    ],
)
def test_the_json_is_what_another_language_would_write(value, text):
    annotation = set[str] if isinstance(value, set) else type(value)

    assert dumps(codec_for(annotation).encode(value)) == text


def test_a_type_may_contain_itself():
    tree = Node(1, [Node(2), Node(3, [Node(4)])])
    codec = codec_for(Node)

    assert codec.decode(loads(dumps(codec.encode(tree)))) == tree


def test_a_value_that_contains_itself_is_refused():
    node = Node(1)
    node.children.append(node)

    with pytest.raises(Misfit, match="nested deeper than 100 levels"):
        codec_for(Node).encode(node)


def test_a_pydantic_model_comes_back_without_its_computed_fields():
    model = Model(at=datetime(2024, 1, 1, tzinfo=UTC), tags={"a"}, theAlias=3)
    codec = codec_for(Model | None)

    written = codec.encode(model)

    assert codec.decode(json.loads(dumps(written))) == model
    assert "shout" not in written
    assert codec.encode({"at": "2024-01-01T00:00:00Z"}) == codec.encode(
        Model(at=datetime(2024, 1, 1, tzinfo=UTC))
    )


def test_a_strict_pydantic_model_comes_back_too():
    model = Strict(at=datetime(2024, 1, 1, tzinfo=UTC), raw=b"x")
    codec = codec_for(list[Strict])

    assert codec.decode(json.loads(dumps(codec.encode([model])))) == [model]


def test_a_whole_number_is_a_float_where_one_is_expected():
    codec = codec_for(float)

    assert (codec.encode(3), codec.decode(10**16)) == (3.0, 1e16)
    assert type(codec.decode(3)) is float


def test_a_decimal_that_another_language_wrote_as_a_number_is_read():
    codec = codec_for(Decimal)

    assert (codec.decode(3), codec.decode(0.1)) == (Decimal(3), Decimal("0.1"))


def refusal(annotation, value, way):
    codec = codec_for(annotation)
    with pytest.raises(Misfit) as caught:
        getattr(codec, way)(value)
    return caught.value.where("args.x")


@pytest.mark.parametrize("way", ["encode", "decode"])
@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (int, "7", "args.x: expected an int, got '7' (str)"),
        (int, True, "args.x: expected an int, got True (bool)"),
        (int, 7.0, "args.x: expected an int, got 7.0 (float)"),
        (int, None, "args.x: expected an int, got None"),
        (float, "1", "args.x: expected a float, got '1' (str)"),
        (float, 10**400, "args.x: too large for a float"),
        (bool, 1, "args.x: expected a bool, got 1 (int)"),
        (str, 1, "args.x: expected a str, got 1 (int)"),
        (None, 0, "args.x: expected None, got 0 (int)"),
        (datetime, "2024-01-01T00:00:00", "args.x: '2024-01-01T00:00:00' has no time zone"),
        (datetime, "soon", "args.x: expected a datetime with time zone, got 'soon'"),
        (datetime, 1, "args.x: expected a datetime with time zone, got 1 (int)"),
        (date, "2024-02-30", "args.x: expected a date, got '2024-02-30'"),
        (UUID, "x", "args.x: expected a UUID, got 'x'"),
        (Decimal, "NaN", "args.x: NaN is not a number"),
        (Decimal, "1,5", "args.x: expected a Decimal, got '1,5'"),
        (timedelta, "1", "args.x: expected a timedelta, got '1' (str)"),
        (timedelta, 10**30, "args.x: 1000000000000000000000000000000 seconds are more than"),
        (bytes, "a", "args.x: expected bytes (as base64), got 'a'"),
        (bytes, "Zm9v!", "args.x: expected bytes (as base64), got 'Zm9v!'"),
        (Colour, "green", "args.x: expected one of 'red', 'blue', got 'green'"),
        (Size, True, "args.x: expected one of 1, 2, got True"),
        (Right, 8, "args.x: expected Right, got 8 (int)"),
        (Literal[1, "a"], True, "args.x: expected one of 1, 'a', got True"),
        (list[int], [1, "2"], "args.x[1]: expected an int, got '2' (str)"),
        (list[int], {"a": 1}, "args.x: expected a list, got a dict"),
        (tuple[int, str], [1], "args.x: expected a tuple of 2, got a list"),
        (dict[str, int], {"a b": None}, "args.x['a b']: expected an int, got None"),
        (dict[int, int], {"1.0": 1}, "args.x['1.0']: expected an int, got '1.0' (str)"),
        (Item, {"price": "1"}, "args.x: Item needs the field 'name'"),
        (Item, {"name": "a", "cost": "1"}, "args.x: Item has no field 'cost'"),
        (list[Item], [{"name": "a", "price": "x"}], "args.x[0].price: expected a Decimal, got 'x'"),
        (Even, {"number": 3}, "args.x: Even refuses it: 'odd'"),
        (Movie, {"released": "2024-01-01"}, "args.x: Movie needs the field 'title'"),
        (list[Model], [{"at": 1, "tags": [2]}], "args.x[0].tags[0]: Model refuses it: Input should be"),
        (int | None, "1", "args.x: expected an int or None, got '1' (str)"),
        (datetime | None, "soon", "args.x: expected a datetime with time zone, got 'soon'"),
    ],
)
def test_what_does_not_fit_is_refused_on_both_ways_with_its_path(annotation, value, reason, way):
    assert refusal(annotation, value, way).startswith(reason)


@pytest.mark.parametrize(
    ("annotation", "value", "reason"),
    [
        (datetime, datetime(2024, 1, 1), "has no time zone, so it names no instant"),  # noqa: DTZ001
        (date, datetime(2024, 1, 1, tzinfo=UTC), "expected a date"),
        (time, time(12, tzinfo=ZoneInfo("Europe/Berlin")), "has a zone whose offset depends on the date"),
        (Decimal, Decimal("Infinity"), "Infinity is not a number"),
        (timedelta, timedelta(days=400_000, microseconds=1), "more digits than a number of seconds keeps"),
        (timedelta, timedelta.max, "seconds are more than a timedelta holds"),
        (float, float("nan"), "nan is not JSON"),
        (str, "a\0", "contains a NUL character at position 1"),
        (list[str], ["a", "\ud800"], "args.x[1]: contains half of a surrogate pair"),
        (int, 10**5000, "an integer of more than 4,300 digits"),
        (list[int], {1}, "expected a list, got a set"),
        (dict[str, int], {1: 1}, "args.x[1]: expected a str, got 1 (int)"),
        (Item, Order, "expected Item, got <class"),
        (Model, Strict(at=datetime(2024, 1, 1, tzinfo=UTC), raw=b""), "expected Model, got Strict("),
        (Item | Colour, Point(1), "expected Item or Colour, got"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, int) else None,
)
def test_a_python_value_that_could_not_come_back_is_refused(annotation, value, reason):
    assert reason in refusal(annotation, value, "encode")


def test_a_subclass_whose_fields_would_be_lost_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Special(Item):
        extra: int = 0

    assert "expected Item, got" in refusal(Item, Special("a"), "encode")


def test_an_object_that_would_come_back_as_another_type_is_refused():
    @dataclasses.dataclass
    class Alike:
        name: str

    codec = codec_for(Item | Alike)

    with pytest.raises(Misfit, match="this Alike would come back as Item"):
        codec.encode(Alike("a"))
    assert codec.decode(codec.encode(Item("a"))) == Item("a")


@pytest.mark.parametrize(
    ("annotation", "reason"),
    [
        (str | datetime, "a str and a datetime with time zone in one union look alike in JSON"),
        (bytes | UUID, "look alike in JSON"),
        (list[int] | set[int], "look alike in JSON"),
        (int | timedelta, "look alike in JSON"),
        (Any | UUID, "look alike in JSON"),
        (dict[str, Any] | Item, "look alike in JSON"),
        (Literal[b"x"], r"Literal\[b'x'\] is not plain JSON"),
        (object(), "cannot carry"),
        (complex, "cannot carry complex as JSON"),
        (typing.Callable[[], int], "cannot carry"),
        (list[complex], "cannot carry complex as JSON"),
        (dict[float, int], "a float cannot be a key of a JSON object"),
        (dict[Item, int], "Item cannot be a key of a JSON object"),
    ],
)
def test_a_type_that_json_could_not_tell_is_refused_before_any_value(annotation, reason):
    with pytest.raises(TypeError, match=reason):
        codec_for(annotation)


def test_a_dataclass_with_a_value_it_does_not_keep_is_refused():
    @dataclasses.dataclass
    class Seeded:
        seed: dataclasses.InitVar[int]

    with pytest.raises(TypeError, match="Seeded has an InitVar"):
        codec_for(Seeded)


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (int, {"type": "integer"}),
        (datetime, {"type": "string", "format": "date-time"}),
        (int | None, {"type": ["integer", "null"]}),
        (list[UUID], {"type": "array", "items": {"type": "string", "format": "uuid"}}),
        (Colour, {"enum": ["red", "blue"]}),
        (Literal["a", 1], {"enum": ["a", 1]}),
        (UUID | None, {"anyOf": [{"type": "string", "format": "uuid"}, {"type": "null"}]}),
        (Item, {"type": "object"}),
        (Any, {}),
    ],
)
def test_a_type_describes_itself_as_json_schema(annotation, schema):
    assert codec_for(annotation).schema() == schema
