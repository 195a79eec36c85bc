"""How the attempts of a claim are dealt out to children."""

from __future__ import annotations

import random

from pgqueue.runtime.nursery import deal
from pgqueue.sql.attempts import ClaimedRow


def rows(count: int) -> list[ClaimedRow]:
    return [
        ClaimedRow(job_id, "t", 1, "touch", "{}", None, 0, "", True, 300.0, 5, 0, None, None, 0.0)
        for job_id in range(count)
    ]


def test_children_with_as_much_room_take_turns() -> None:
    first, second = deal(rows(5), [3, 3])

    assert [row.job_id for row in first] == [0, 2, 4]
    assert [row.job_id for row in second] == [1, 3]


def test_each_row_goes_to_the_child_with_most_room_then() -> None:
    choice = random.Random(7)
    for _ in range(300):
        free = [choice.randint(-5, 12) for _ in range(choice.randint(1, 5))]
        left = list(free)
        expected: list[list[int]] = [[] for _ in free]
        given = rows(choice.randint(0, 40))
        for row in given:
            most = left.index(max(left))
            expected[most].append(row.job_id)
            left[most] -= 1

        dealt = deal(given, list(free))

        assert [[row.job_id for row in one] for one in dealt] == expected
