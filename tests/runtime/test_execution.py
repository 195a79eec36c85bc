"""The engine that runs handlers: every attempt is reported once, whatever its handler does."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from pgqueue.errors import Cancel, RetryAfter, Snooze, Unrecoverable
from pgqueue.model.context import JobContext
from pgqueue.model.outcome import PLAIN_SUCCESS, RELEASED, Ending, Outcome
from pgqueue.model.task import TaskRegistry, define
from pgqueue.runtime import execution
from pgqueue.runtime.board import Board
from pgqueue.runtime.execution import Ended, Engine
from pgqueue.runtime.wire import frame


class Bench:
    """An engine with a registry of its own, and what it reported."""

    def __init__(self, slots: int = 4) -> None:
        self.registry = TaskRegistry()
        self.outcomes: dict[int, Outcome] = {}
        self.progress: dict[int, Any] = {}
        self.board = Board.create(64)
        self._arrived = asyncio.Event()
        self.engine = Engine(self.registry, slots, self._report, self.progress.update, self.board, "pgqueue")
        self._serial = 0

    def _report(
        self, serials: list[int], seconds: list[float], others: list[tuple[int, float, Outcome]]
    ) -> None:
        assert len(serials) == len(seconds)
        for serial, _, outcome in [*((serial, 0.0, PLAIN_SUCCESS) for serial in serials), *others]:
            assert serial not in self.outcomes, "reported twice"
            self.outcomes[serial] = outcome
        self._arrived.set()

    def task(self, **options: Any) -> Callable[[Any], Any]:
        def add(function: Any) -> Any:
            self.registry.add(define(function, **options))
            return function

        return add

    def submit(self, task: str, args: str = "{}", seconds: float = 60, attempt: int = 1) -> int:
        return self.submit_all([(task, args)], seconds, attempt)[0]

    def submit_all(self, jobs: list[tuple[str, str]], seconds: float = 60, attempt: int = 1) -> list[int]:
        first, self._serial = self._serial + 1, self._serial + len(jobs)
        serials = list(range(first, self._serial + 1))
        self.engine.submit(
            first,
            [
                (1000 + serial, attempt, task, args, seconds, 5, 0, None, None)
                for serial, (task, args) in zip(serials, jobs, strict=True)
            ],
            "default",
            "",
        )
        return serials

    async def outcome(self, serial: int) -> Outcome:
        async with asyncio.timeout(60):
            while serial not in self.outcomes:
                self._arrived.clear()
                await self._arrived.wait()
        return self.outcomes[serial]


def bench(test: Callable[[Bench], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run an async test with a bench of its own."""

    def run() -> None:
        async def body() -> None:
            made = Bench()
            with pytest.MonkeyPatch.context() as patch:
                # Nothing goes back because this machine is busy.
                patch.setattr(execution, "STALE_SECONDS", 600)
                try:
                    await test(made)
                finally:
                    made.engine.close()

        asyncio.run(body())

    run.__name__ = test.__name__
    return run


async def outcome_of_one_that_began(bench: Bench, task: str, seconds: float) -> Outcome:
    """Run a job with so short a deadline; one that a busy machine begins too late goes back."""
    for _ in range(20):
        if (outcome := await bench.outcome(bench.submit(task, seconds=seconds))) != RELEASED:
            break
    return outcome


@bench
async def test_a_handlers_result_is_its_outcome(bench: Bench) -> None:
    @bench.task()
    def double(number: int) -> int:
        return number * 2

    @bench.task()
    async def triple(number: int) -> int:
        return number * 3

    first, second = bench.submit("double", '{"number": 4}'), bench.submit("triple", '{"number": 4}')

    assert await bench.outcome(first) == Outcome(Ending.SUCCEEDED, "8")
    assert await bench.outcome(second) == Outcome(Ending.SUCCEEDED, "12")


@bench
async def test_what_a_handler_raises_decides_its_outcome(bench: Bench) -> None:
    @bench.task(retry=7)
    def plain() -> None:
        raise RuntimeError("no luck")

    @bench.task(unrecoverable=[KeyError])
    async def listed() -> None:
        raise KeyError("gone")

    def raising(name: str, error: BaseException) -> None:
        def handler() -> None:
            raise error

        bench.registry.add(define(handler, name=name))

    raising("later", RetryAfter(42))
    raising("snoozed", Snooze(43))
    raising("given_up", Cancel("nobody wants it"))
    raising("hopeless", Unrecoverable("bad account"))

    def ending(outcome: Outcome) -> tuple[Ending, float | None]:
        return outcome.ending, outcome.seconds

    assert ending(await bench.outcome(bench.submit("plain"))) == (Ending.FAILED, 7.0)
    assert ending(await bench.outcome(bench.submit("listed"))) == (Ending.DEAD, None)
    assert ending(await bench.outcome(bench.submit("later"))) == (Ending.FAILED, 42.0)
    assert ending(await bench.outcome(bench.submit("snoozed"))) == (Ending.SNOOZED, 43.0)
    assert ending(await bench.outcome(bench.submit("given_up"))) == (Ending.CANCELLED, None)
    assert ending(await bench.outcome(bench.submit("hopeless"))) == (Ending.DEAD, None)


@bench
async def test_no_exception_of_a_handler_ends_the_engine(bench: Bench) -> None:
    for kind in (SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, BaseException):

        def sync(kind: type[BaseException] = kind) -> None:
            raise kind

        async def awaiting(kind: type[BaseException] = kind) -> None:
            raise kind

        # Defaults are arguments of the job, so each is wrapped before it is declared.
        bench.registry.add(define(lambda run=sync: run(), name=f"sync {kind.__name__}"))

        async def run_async(run: Any = awaiting) -> None:
            await run()

        bench.registry.add(define(run_async, name=f"async {kind.__name__}"))

    for definition in list(bench.registry):
        outcome = await bench.outcome(bench.submit(definition.name))

        assert outcome.ending is Ending.FAILED, definition.name
        assert definition.name.split()[1] in (outcome.text or "")


@bench
async def test_arguments_that_do_not_fit_are_dead_at_once_and_alone(bench: Bench) -> None:
    @bench.task()
    def double(number: int) -> int:
        return number * 2

    bad = [bench.submit("double", args) for args in ("[]", "{", '{"number": "x"}', "{}", '{"other": 1}')]
    good = bench.submit("double", '{"number": 1}')

    assert [(await bench.outcome(serial)).ending for serial in bad] == [Ending.DEAD] * 5
    assert (await bench.outcome(good)).ending is Ending.SUCCEEDED


@bench
async def test_a_task_that_is_not_known_is_said_to_be_unknown(bench: Bench) -> None:
    @bench.task()
    def resize() -> None: ...

    outcome = await bench.outcome(bench.submit("resise"))

    assert outcome.ending is Ending.UNKNOWN_TASK
    assert "did you mean 'resize'" in (outcome.text or "")


@bench
async def test_never_more_handlers_run_than_there_are_slots(bench: Bench) -> None:
    lock, now, most, are_full = threading.Lock(), [0], [0], threading.Event()

    def enter(change: int) -> None:
        with lock:
            now[0] += change
            most[0] = max(most[0], now[0])
            if now[0] == 4:
                are_full.set()

    # The first four wait for each other, with all the others ready.
    @bench.task()
    def sync() -> None:
        enter(1)
        are_full.wait(60)
        threading.Event().wait(0.005)
        enter(-1)

    @bench.task()
    async def awaiting() -> None:
        enter(1)
        while not are_full.is_set():
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.005)
        enter(-1)

    serials = [bench.submit("sync" if number % 3 else "awaiting") for number in range(60)]
    for serial in serials:
        await bench.outcome(serial)

    assert most[0] == 4


@bench
async def test_an_async_handler_past_its_deadline_is_cancelled_and_timed_out(bench: Bench) -> None:
    @bench.task(retry=1)
    async def slow() -> None:
        await asyncio.sleep(3600)

    outcome = await outcome_of_one_that_began(bench, "slow", 0.05)

    assert outcome.ending is Ending.FAILED
    assert "timed out" in (outcome.text or "")


@bench
async def test_a_sync_handler_can_ask_whether_to_go_on(bench: Bench) -> None:
    started = threading.Event()

    @bench.task()
    def patient(job: JobContext) -> None:
        started.set()
        while True:
            job.check()
            threading.Event().wait(0.01)

    late = await outcome_of_one_that_began(bench, "patient", 0.05)
    assert "timed out" in (late.text or "")

    started.clear()
    serial = bench.submit("patient")
    await asyncio.to_thread(started.wait)
    bench.engine.cancel([serial])
    assert (await bench.outcome(serial)).ending is Ending.CANCELLED


@bench
async def test_a_cancel_reaches_a_handler_before_its_first_step(bench: Bench) -> None:
    started = []

    @bench.task()
    async def slow() -> None:
        started.append(1)
        await asyncio.sleep(3600)

    serial = bench.submit("slow")
    bench.engine.cancel([serial])

    assert (await bench.outcome(serial)).ending is Ending.CANCELLED
    assert not started


@bench
async def test_what_has_not_started_is_given_back_on_stop(bench: Bench) -> None:
    release = threading.Event()

    started = threading.Semaphore(0)

    @bench.task()
    def hold() -> None:
        started.release()
        release.wait(60)

    running = [bench.submit("hold") for _ in range(4)]
    waiting = [bench.submit("hold") for _ in range(3)]
    for _ in range(4):
        await asyncio.to_thread(started.acquire)
    bench.engine.stop()

    assert [(await bench.outcome(serial)).ending for serial in waiting] == [Ending.RELEASED] * 3
    release.set()
    assert [(await bench.outcome(serial)).ending for serial in running] == [Ending.SUCCEEDED] * 4


@bench
async def test_what_waits_too_long_behind_long_jobs_is_given_back(bench: Bench) -> None:
    release = threading.Event()

    @bench.task()
    def hold() -> None:
        release.wait(60)

    running = [bench.submit("hold") for _ in range(4)]
    waiting = bench.submit("hold")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execution, "STALE_SECONDS", 1.0)
        assert (await bench.outcome(waiting)).ending is Ending.RELEASED
    release.set()
    for serial in running:
        await bench.outcome(serial)


@bench
async def test_the_board_shows_who_runs_and_nobody_else(bench: Bench) -> None:
    started, release = threading.Semaphore(0), threading.Event()

    @bench.task()
    def hold() -> None:
        started.release()
        release.wait(60)

    serials = [bench.submit("hold") for _ in range(6)]
    for _ in range(4):
        await asyncio.to_thread(started.acquire)
    seen = bench.board.running()
    release.set()
    for serial in serials:
        await bench.outcome(serial)

    assert seen == set(serials[:4])
    assert bench.board.running() == set()


@bench
async def test_context_variables_of_one_job_are_not_seen_by_the_next(bench: Bench) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    @bench.task()
    def sync() -> str:
        before = variable.get()
        variable.set("dirty")
        return before

    @bench.task()
    async def awaiting() -> str:
        before = variable.get()
        variable.set("dirty")
        return before

    for _ in range(8):
        assert (await bench.outcome(bench.submit("sync"))).text == '"clean"'
        assert (await bench.outcome(bench.submit("awaiting"))).text == '"clean"'


@bench
async def test_a_result_that_cannot_be_kept_does_not_undo_the_work(bench: Bench) -> None:
    @bench.task()
    def odd() -> object:
        return object()

    @bench.task()
    def large() -> str:
        return "x" * 2_000_000

    for name in ("odd", "large"):
        outcome = await bench.outcome(bench.submit(name))
        assert outcome.ending is Ending.SUCCEEDED
        assert outcome.text is None
        assert outcome.note


async def passed_on(bench: Bench, *said: Any) -> Any:
    """Give what becomes of the progress that a handler reports."""
    release = threading.Event()

    @bench.task()
    def work(job: JobContext) -> None:
        job.progress(*said)
        release.wait(60)

    serial = bench.submit("work")
    async with asyncio.timeout(60):
        while serial not in bench.progress:
            await asyncio.sleep(0.01)
    release.set()
    await bench.outcome(serial)
    return bench.progress[serial]


@bench
async def test_progress_is_passed_on(bench: Bench) -> None:
    progress = await passed_on(bench, 3, 10, "three of ten")

    assert progress["done"] == 3


@bench
async def test_no_failure_is_too_odd_to_be_reported(bench: Bench) -> None:
    class Unannotatable(Exception):
        __notes__ = 7  # type: ignore[assignment]

    class Unspeakable(Exception):
        def __str__(self) -> str:
            raise SystemExit

    def leave(_attempt: int, _error: BaseException) -> float:
        raise SystemExit

    def raising(name: str, error: BaseException, **options: Any) -> None:
        async def awaiting() -> None:
            raise error

        def sync() -> None:
            raise error

        bench.registry.add(define(awaiting, name=f"{name} async", **options))
        bench.registry.add(define(sync, name=f"{name} sync", **options))

    raising("odd", Unannotatable(), retry=leave)
    raising("mute", Unspeakable())
    raising("tired", Snooze(1, reason="half a pair \ud800 \x00"))
    raising("busy", Snooze(1, reason=object()))  # type: ignore[arg-type]

    for definition in list(bench.registry):
        outcome = await bench.outcome(bench.submit(definition.name))

        assert frame(outcome.to_wire()), definition.name
        assert "\x00" not in (outcome.text or "")


@bench
async def test_jobs_wait_for_a_thread_when_the_system_allows_no_more(bench: Bench) -> None:
    start, allowed = threading.Thread.start, [2]

    def start_some(thread: threading.Thread) -> None:
        if thread.name.startswith("pgqueue-slot"):
            allowed[0] -= 1
            if allowed[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    @bench.task()
    def work() -> None:
        threading.Event().wait(0.01)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading.Thread, "start", start_some)
        serials = [bench.submit("work") for _ in range(20)]
        outcomes = [await bench.outcome(serial) for serial in serials]

    assert [outcome.ending for outcome in outcomes] == [Ending.SUCCEEDED] * 20


@bench
async def test_a_full_board_fails_no_job(bench: Bench) -> None:
    while bench.board.put(1) >= 0:
        pass

    @bench.task()
    def work() -> None: ...

    assert (await bench.outcome(bench.submit("work"))).ending is Ending.SUCCEEDED


def test_a_handlers_log_lines_carry_its_job(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[Any] = []

    @bench
    async def body(bench: Bench) -> None:
        from pgqueue.runtime.log import current_attempt

        @bench.task()
        def talk() -> None:
            seen.append(current_attempt.get())
            logging.getLogger("shop").warning("hello")

        serial = bench.submit("talk")
        await bench.outcome(serial)

    body()

    assert seen == [(1001, 1, "talk")]


@bench
async def test_a_handler_in_a_thread_waits_for_none_that_holds_the_loop_up(bench: Bench) -> None:
    ran = threading.Event()

    @bench.task()
    def in_thread() -> None:
        ran.set()

    @bench.task()
    async def rude() -> bool:
        return ran.wait(60)

    serials = bench.submit_all([("rude", "{}"), ("in_thread", "{}")])

    assert [(await bench.outcome(serial)).text for serial in serials] == ["true", None]


@bench
async def test_handlers_that_wait_run_in_all_slots_at_once(bench: Bench) -> None:
    begun = 0
    all_begun = asyncio.Event()

    @bench.task()
    async def meet() -> None:
        nonlocal begun
        begun += 1
        if begun == 4:
            all_begun.set()
        await all_begun.wait()

    serials = bench.submit_all([("meet", "{}")] * 4)

    assert [(await bench.outcome(serial)).ending for serial in serials] == [Ending.SUCCEEDED] * 4


@bench
async def test_of_jobs_that_never_wait_one_task_works_off_whatever_arrives(bench: Bench) -> None:
    # Each task holds the loop up for a slice of time, and reports and messages wait for all of them.
    tasks: set[int] = set()

    @bench.task()
    async def note_task() -> None:
        tasks.add(id(asyncio.current_task()))

    serials = [bench.submit("note_task") for _ in range(8)]
    for serial in serials:
        assert await bench.outcome(serial) is PLAIN_SUCCESS
    assert len(tasks) == 1


@bench
async def test_a_job_whose_task_is_ended_before_it_begins_goes_back_and_holds_up_none(bench: Bench) -> None:
    @bench.task()
    async def quick() -> None:
        pass

    ours = asyncio.all_tasks()
    unbegun = [bench.submit("quick") for _ in range(4)]
    for task in asyncio.all_tasks() - ours:  # as a handler may do that wants everything to end
        task.cancel()
    await asyncio.sleep(0)
    later = bench.submit("quick")
    assert await bench.outcome(unbegun[0]) == RELEASED
    for serial in (*unbegun[1:], later):
        assert await bench.outcome(serial) is PLAIN_SUCCESS


@bench
async def test_handlers_that_block_run_in_all_slots_at_once(bench: Bench) -> None:
    meeting = threading.Barrier(4, timeout=60)

    @bench.task()
    def meet() -> None:
        meeting.wait()

    serials = bench.submit_all([("meet", "{}")] * 4)

    assert [(await bench.outcome(serial)).ending for serial in serials] == [Ending.SUCCEEDED] * 4


@bench
async def test_a_cancellation_that_comes_late_meets_no_other_job(bench: Bench) -> None:
    async def stray(handler: Callable[[], None]) -> list[Ending]:
        @bench.task(name=f"leaves {handler.__name__}")
        async def leaves() -> None:
            handler()

        serials = bench.submit_all([(f"leaves {handler.__name__}", "{}"), ("waits", "{}"), ("waits", "{}")])
        return [(await bench.outcome(serial)).ending for serial in serials]

    @bench.task()
    async def waits() -> None:
        await asyncio.sleep(0.05)

    def this_task() -> asyncio.Task[Any]:
        task = asyncio.current_task()
        assert task is not None
        return task

    def at_once() -> None:
        this_task().cancel()

    def by_timer() -> None:
        asyncio.get_running_loop().call_later(0.01, this_task().cancel)

    for handler in (at_once, by_timer):
        assert await stray(handler) == [Ending.SUCCEEDED] * 3


@bench
async def test_a_handler_may_time_out_what_it_does(bench: Bench) -> None:
    @bench.task()
    async def patient() -> str:
        try:
            async with asyncio.timeout(0.01):
                await asyncio.sleep(60)
        except TimeoutError:
            pass
        async with asyncio.timeout(60):  # noqa: ASYNC100  a handler may do so all the same
            return "went on"

    @bench.task()
    async def quick() -> str:
        async with asyncio.timeout(60):  # noqa: ASYNC100  a handler may do so all the same
            return "in time"

    serials = bench.submit_all([("quick", "{}"), ("patient", "{}"), ("quick", "{}")])

    assert [(await bench.outcome(serial)).text for serial in serials] == [
        '"in time"',
        '"went on"',
        '"in time"',
    ]


@bench
async def test_a_handler_keeps_its_context_variables_while_it_waits(bench: Bench) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="clean")

    @bench.task()
    async def awaiting(name: str) -> list[str]:
        before = variable.get()
        variable.set(name)
        await asyncio.sleep(0.01)
        inherited = await asyncio.create_task(read())
        return [before, variable.get(), inherited]

    async def read() -> str:
        return variable.get()

    serials = bench.submit_all([("awaiting", f'{{"name": "{name}"}}') for name in "abcdef"])

    for serial, name in zip(serials, "abcdef", strict=True):
        assert (await bench.outcome(serial)).text == f'["clean", "{name}", "{name}"]'


@bench
async def test_a_cancelled_handler_may_clean_up_and_the_next_job_runs_as_ever(bench: Bench) -> None:
    started, cleaned = asyncio.Event(), []

    @bench.task()
    async def slow() -> None:
        started.set()
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(1)

    @bench.task()
    async def deaf() -> str:
        started.set()
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            return "would not hear"
        return "heard nothing"

    outcomes = []
    for name in ("slow", "deaf"):
        started.clear()
        serial = bench.submit(name)
        await started.wait()
        bench.engine.cancel([serial])
        outcomes.append((await bench.outcome(serial)).ending)

    assert outcomes == [Ending.CANCELLED, Ending.SUCCEEDED]
    assert cleaned == [1]


@bench
async def test_an_outcome_that_cannot_be_passed_on_takes_no_neighbour_along(bench: Bench) -> None:
    report = bench.engine._report

    def report_as_a_child_does(serials: list[int], seconds: list[float], others: list[Ended]) -> None:
        frame(["done", 0, serials, seconds, [one[2].to_wire() for one in others]])
        report(serials, seconds, others)

    bench.engine._report = report_as_a_child_does
    ends = [
        PLAIN_SUCCESS,
        Outcome(Ending.SUCCEEDED, "2"),
        Outcome(Ending.SUCCEEDED, "half a pair \ud800"),
        Outcome(Ending.FAILED, "no luck", object()),  # type: ignore[arg-type]
        Outcome(Ending.SUCCEEDED, "5"),
    ]
    for serial, outcome in enumerate(ends):
        bench.engine._note_end(serial, bench.board.put(serial), 0.0, outcome)

    _, second, third, fourth, fifth = [await bench.outcome(serial) for serial in range(len(ends))]

    assert (second.text, fifth.text) == ("2", "5")
    assert (third.ending, third.text) == (Ending.SUCCEEDED, None)
    assert "could not be passed on" in (third.note or "")
    assert fourth.ending is Ending.FAILED
    assert "could not be passed on" in (fourth.text or "")
    await asyncio.sleep(0)
    assert not bench.board.running()


@bench
async def test_progress_too_large_for_a_number_is_left_out(bench: Bench) -> None:
    progress = await passed_on(bench, 10**400, 2**70, "far")

    assert progress == {"total": 2**70, "message": "far"}
    assert frame(["progress", list(bench.progress.items())])


def logged(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate as one does who thinks of plain functions only."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


@bench
async def test_a_handler_that_was_called_but_never_ran_is_dead_and_says_why(bench: Bench) -> None:
    ran = []

    @logged
    async def hidden(number: int) -> None:
        ran.append(number)

    async def forgetful(number: int) -> Any:
        return hidden(number)

    def steps(number: int) -> Any:
        ran.append(number)
        yield

    async def asteps(number: int) -> Any:
        ran.append(number)
        yield

    async def elsewhere() -> asyncio.Task[int]:
        return asyncio.create_task(asyncio.sleep(0, 1))

    for name, handler in (
        ("sync", hidden),
        ("async", forgetful),
        ("steps", logged(steps)),
        ("async steps", logged(asteps)),
    ):
        bench.registry.add(define(handler, name=name))
        bench.registry.add(define(handler, name=f"{name} without result", store_result=False))
    names = [definition.name for definition in bench.registry]
    bench.registry.add(define(elsewhere))

    for name in names:
        outcome = await bench.outcome(bench.submit(name, '{"number": 1}'))

        assert outcome.ending is Ending.DEAD, name
        assert "did not run" in (outcome.text or ""), name
        assert "decorator" in (outcome.text or ""), name
    assert not ran
    # What is under way already is a result that is not kept, no more.
    assert (await bench.outcome(bench.submit("elsewhere"))).ending is Ending.SUCCEEDED


@bench
async def test_a_handler_that_is_async_in_a_roundabout_way_runs(bench: Bench) -> None:
    class Handler:
        async def __call__(self, number: int, factor: int) -> int:
            return number * factor

    bench.registry.add(define(functools.partial(Handler(), factor=3), name="triple"))

    assert (await bench.outcome(bench.submit("triple", '{"number": 4}'))).text == "12"


@bench
async def test_a_handler_may_return_steps_that_are_not_its_own(bench: Bench) -> None:
    @bench.task()
    def squares() -> Any:
        return (number**2 for number in range(3))

    assert (await bench.outcome(bench.submit("squares"))).ending is Ending.SUCCEEDED


@bench
async def test_what_was_read_too_late_or_is_not_ours_any_more_does_not_begin(bench: Bench) -> None:
    began = []

    @bench.task()
    def sync() -> None:
        began.append("sync")

    @bench.task()
    async def awaiting() -> None:
        began.append("awaiting")

    def submit(serial: int, task: str, seconds: float, waited: float) -> None:
        one = (1000 + serial, 1, task, "{}", seconds, 5, 0, None, None)
        bench.engine.submit(serial, [one], "default", "", time.monotonic() - waited)

    bench.board.revoke([3, 4])
    with pytest.MonkeyPatch.context() as patch:
        # Else what has not begun by the first tick goes back for having waited so long.
        patch.setattr(execution, "_TICK_SECONDS", 60)
        patch.setattr(execution, "STALE_SECONDS", 1.0)
        for serial, (seconds, waited) in enumerate([(2, 3), (2, 3), (0, 3), (0, 3), (60, 0.9), (0, 3)], 1):
            submit(serial, "awaiting" if serial % 2 else "sync", seconds, waited)

        outcomes = [await bench.outcome(serial) for serial in range(1, 7)]

    assert outcomes[:4] == [RELEASED] * 4
    assert outcomes[4:] == [PLAIN_SUCCESS] * 2
    assert sorted(began) == ["awaiting", "sync"]
    await asyncio.sleep(0)
    assert not bench.board.running() | bench.board.ended()
