import pytest

from pgqueue.model.keys import KeyTemplate


@pytest.mark.parametrize(
    ("template", "args", "key"),
    [
        ("nightly", {}, "nightly"),
        ("charge:{order_id}", {"order_id": 7}, "charge:7"),
        ("{a}/{b}/{a}", {"a": "x", "b": True}, "x/true/x"),
        ("{a}", {"a": False}, "false"),
        ("{a}", {"a": -(10**30)}, "-1000000000000000000000000000000"),
        ("{a}", {"a": "{b}"}, "{b}"),
        ("größe:{a}", {"a": "é"}, "größe:é"),
    ],
)
def test_a_key_has_the_arguments_values_in_its_places(template, args, key):
    assert KeyTemplate(template).render(args, {}) == key


def test_a_missing_argument_is_taken_from_the_defaults():
    template = KeyTemplate("{tenant}:{order_id}")

    key = template.render({"order_id": 7}, {"tenant": "acme", "order_id": 1})

    assert key == "acme:7"


@pytest.mark.parametrize("value", [None, 1.5, [1], {"a": 1}])
def test_a_value_whose_text_is_not_certain_makes_no_key(value):
    with pytest.raises(ValueError, match="needs a string, an integer or a boolean for 'a'"):
        KeyTemplate("k:{a}").render({"a": value}, {})


def test_an_argument_without_value_or_default_makes_no_key():
    with pytest.raises(ValueError, match="needs the argument 'a'"):
        KeyTemplate("k:{a}").render({}, {})


def test_a_key_of_255_bytes_fits_and_one_of_256_does_not():
    template = KeyTemplate("{a}")

    assert len(template.render({"a": "é" * 127 + "x"}, {}).encode()) == 255
    with pytest.raises(ValueError, match="has 256 bytes, at most 255 fit"):
        template.render({"a": "é" * 128}, {})


def test_a_key_may_not_come_out_empty():
    with pytest.raises(ValueError, match="not empty"):
        KeyTemplate("{a}").render({"a": ""}, {})


@pytest.mark.parametrize("template", ["", "a{", "a}", "{}", "{a.b}", "{a!r}", "{a:3}", "{{a}}", "{1}", "a\0"])
def test_a_template_that_could_be_read_in_two_ways_is_refused(template):
    with pytest.raises(ValueError, match=r"key template|a key template"):
        KeyTemplate(template)


def test_a_place_that_is_no_argument_is_refused_with_the_arguments_there_are():
    with pytest.raises(ValueError, match=r"names 'order', which is no argument \(order_id, total\)"):
        KeyTemplate("{order}").check_names(["order_id", "total"])
