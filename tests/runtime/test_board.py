"""The memory that tells the parent who runs, and the child what it must not begin."""

from __future__ import annotations

import os

from pgqueue.runtime.board import Board


def test_both_sides_see_who_runs_who_has_ended_and_what_is_revoked() -> None:
    ours = Board.create(4)
    theirs = Board(os.dup(ours.descriptor), ours.places)

    places = [theirs.put(serial) for serial in (7, 8, 9)]
    theirs.mark_ended(places[1])
    theirs.clear([places[2]])
    ours.revoke([10, 11])

    assert ours.running() == {7}
    assert ours.ended() == {8}
    assert [serial for serial in range(7, 13) if theirs.is_revoked(serial)] == [10, 11]
    ours.close()
    theirs.close()


def test_the_newest_revocations_count_however_many_there_were() -> None:
    board = Board.create(4)

    for serial in range(1, 20_001):
        board.revoke([serial])

    assert not board.is_revoked(1)
    assert all(board.is_revoked(serial) for serial in range(19_000, 20_001))
    assert board.running() == board.ended() == set()
    assert board.put(1) >= 0
    board.close()
