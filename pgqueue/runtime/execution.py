"""Running handlers: on the event loop or in threads, never more at once than there are slots.

The same engine serves a child process and, with `--processes 0`, the parent itself. It is told
what to run and reports how each attempt ended; it knows nothing of tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import math
import random
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, cast

from pgqueue.errors import UnknownTask
from pgqueue.model.arguments import Signature
from pgqueue.model.context import JobContext
from pgqueue.model.outcome import PLAIN_SUCCESS, RELEASED, Ending, Outcome, clean, outcome_of
from pgqueue.model.task import NOT_DONE, TaskDefinition, TaskRegistry
from pgqueue.runtime.attempt import Attempt
from pgqueue.runtime.board import Board
from pgqueue.runtime.log import current_attempt
from pgqueue.runtime.once import EndsAs, Once

# A job that was sent ahead and could not start for this long goes back: the slots turned out to be
# busy with long jobs, and another worker may have room.
STALE_SECONDS = 1.0
# One that was sent so long ago has to look whether it may still begin.
_LATE_SECONDS = 0.25
PROGRESS_SECONDS = 1.0
_TICK_SECONDS = 0.05
# Handlers that never wait run one after another for so long in all, until the loop gets its turn. Each turn
# costs a message to the parent as well: with shorter ones jobs of 200 us cost a twenty-fifth more.
_SLICE_SECONDS = 0.01
# While more waits, ends are reported when there are so many, or after so long.
_FLUSH_JOBS = 250
_FLUSH_SECONDS = 0.005

# (serial, seconds the handler ran, outcome)
Ended = tuple[int, float, Outcome]


class Engine:
    """Runs attempts in at most `slots` slots.

    `report` is called on the loop with those that ended: the serials of plain successes, how long each of
    these ran, and all others in full. `report_progress` gets what handlers said of how far they are, by
    serial.

    A slot is a thread or a task that goes through the backlog from its head. It starts the next one
    when there is more to do than it gets done itself, so that many small jobs wake few.
    """

    def __init__(
        self,
        registry: TaskRegistry,
        slots: int,
        report: Callable[[list[int], list[float], list[Ended]], None],
        report_progress: Callable[[dict[int, dict[str, Any]]], None],
        board: Board,
        schema: str,
    ) -> None:
        self._registry = registry
        self._slots = slots
        self._report = report
        self._report_progress = report_progress
        self._board = board
        self._once = Once(schema, slots)
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # Taken by the loop and by handler threads: a thread that ends a job takes the next one
        # itself, since a detour over the loop costs more than a small job does.
        self._lock = threading.Lock()
        self._backlog: deque[Attempt] = deque()
        self._used = 0
        self._running: dict[int, Attempt] = {}
        self._progress: dict[int, dict[str, Any]] = {}
        self._progress_due_at = 0.0
        # Serial, place on the board, seconds, outcome.
        self._ended: list[tuple[int, int, float, Outcome]] = []
        self._is_flush_due = False
        self._tasks: set[asyncio.Task[None]] = set()
        # Those that go through the backlog, rather than wait for what their handler waits for.
        self._runners: set[asyncio.Task[None]] = set()
        self._thread_jobs: SimpleQueue[Attempt | None] = SimpleQueue()
        self._threads = 0
        self._idle_threads = 0
        # Ticks only while there is something to look after: an idle engine costs nothing.
        self._ticker: asyncio.TimerHandle | None = None

    # Called on the loop.

    def submit(
        self,
        first_serial: int,
        sent: Sequence[Sequence[Any]],
        queue: str,
        token: str,
        sent_at: float | None = None,
    ) -> None:
        """Take attempts over, as the wire describes them; each is reported exactly once."""
        if sent_at is None:
            sent_at = time.monotonic()
        definitions = {name: self._registry.get(name) for name in {one[2] for one in sent}}
        arrived = []
        for serial, one in enumerate(sent, first_serial):
            definition = definitions[one[2]]
            if definition is None:
                self._note_end(serial, -1, 0.0, outcome_of_unknown(one[2], self._registry))
            else:
                arrived.append(Attempt(serial, one, queue, token, definition, sent_at))
        with self._lock:
            self._backlog.extend(arrived)
        if self._ticker is None:
            self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        self._fill_unless_run()

    def cancel(self, serials: Iterable[int]) -> None:
        """Ask attempts to stop because somebody cancelled their job."""
        for attempt in self._stop_running(serials):
            attempt.is_cancel_requested = True
            self._interrupt(attempt)

    def lose(self, serials: Iterable[int]) -> None:
        """Ask attempts to stop because their lease is lost."""
        for attempt in self._stop_running(serials):
            attempt.is_lost = True
            self._interrupt(attempt)

    def stop(self) -> None:
        """Start nothing more; what has not started is reported as released."""
        with self._lock:
            waiting, self._backlog = list(self._backlog), deque()
        self._release(waiting)

    def close(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        for _ in range(self._threads):
            self._thread_jobs.put(None)
        self._once.close()

    def _stop_running(self, serials: Iterable[int]) -> list[Attempt]:
        """Give those that run, and end those that wait."""
        wanted = set(serials)
        with self._lock:
            waiting = [attempt for attempt in self._backlog if attempt.serial in wanted]
            for attempt in waiting:
                self._backlog.remove(attempt)
            running = [self._running[serial] for serial in wanted if serial in self._running]
        self._release(waiting)
        return running

    def _release(self, waiting: Iterable[Attempt]) -> None:
        for attempt in waiting:
            self._end(attempt, RELEASED)

    def _interrupt(self, attempt: Attempt) -> None:
        # A thread cannot be interrupted, but for a statement it waits for: its handler may ask its
        # context, and past the grace the parent kills the process.
        if attempt.task is not None:
            attempt.task.cancel()
        elif (cancel := attempt.cancel_statement) is not None:
            cancel()

    def _start_task(self, attempt: Attempt) -> None:
        task = self._loop.create_task(self._run_task(attempt))
        self._tasks.add(task)
        self._runners.add(task)
        task.add_done_callback(partial(self._give_back_unbegun, attempt))

    def _give_back_unbegun(self, attempt: Attempt, task: asyncio.Task[None]) -> None:
        # A handler that cancels all tasks there are may end one before its first step.
        if task in self._tasks:
            self._end(attempt, RELEASED)
            self._leave(task)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """Give up the slot that a task was started for."""
        self._tasks.discard(task)
        self._runners.discard(task)
        with self._lock:
            self._used -= 1
        self._fill_unless_run()

    async def _run_task(self, following: Attempt | None) -> None:
        """Run async handlers one after another until one has waited for something; the body of a task.

        Small jobs cost less than a task for each would. But whoever has waited was seen by the world in this
        task, and a cancellation meant for it may come late: it was the last one here. So was whoever left a
        reference to the task behind, with a timer say, or cancelled it.
        """
        task = cast("asyncio.Task[None]", asyncio.current_task())
        try:
            references = sys.getrefcount(task)
            slice_ends_at = time.monotonic() + _SLICE_SECONDS / len(self._runners)
            while (attempt := following) is not None:
                if self._is_thread_due():
                    # However long this one holds the loop up, what is for a thread need not wait.
                    self._fill()
                attempt.task = task
                steps = _Steps(self._run_async(attempt))
                if not steps.begin():
                    # Others go on meanwhile. Two, and soon all of them if they all wait.
                    self._runners.discard(task)
                    self._fill()
                    self._fill()
                    self._end(attempt, await steps)
                    return
                attempt.task = None
                self._end(attempt, steps.result)
                if sys.getrefcount(task) != references or task.cancelling():
                    return
                if time.monotonic() >= slice_ends_at:
                    await asyncio.sleep(0)
                    references = sys.getrefcount(task)
                    slice_ends_at = time.monotonic() + _SLICE_SECONDS / len(self._runners)
                following = self._next(is_async=True)
        finally:
            self._leave(task)

    def _is_thread_due(self) -> bool:
        try:
            return not self._backlog[0].definition.signature.is_async
        except IndexError:  # not seldom: a thread may take the last one at any time
            return False

    async def _call_async(self, attempt: Attempt, definition: TaskDefinition) -> Outcome:
        function, signature = definition.function, definition.signature
        args = signature.decode(attempt.args)
        if definition.is_transactional:
            return await self._once.atransact(
                attempt, definition, lambda conn: function(**self._inject(attempt, signature, args, conn))
            )
        if attempt.idempotency_key is not None:
            if (outcome := await self._once.abegin(attempt, definition)) is not None:
                return outcome
            if attempt.is_takeover and (reconcile := definition.reconcile) is not None:
                attempt.is_reconciling = True
                value = await reconcile.function(**self._inject(attempt, reconcile.signature, args))
                if value is not NOT_DONE:
                    return definition.success(value)
                attempt.is_reconciling = False
        return definition.success(await function(**self._inject(attempt, signature, args)))

    async def _run_async(self, attempt: Attempt) -> Outcome:
        definition = attempt.definition
        try:
            self._begin(attempt)
            return await self._call_async(attempt, definition)
        except asyncio.CancelledError as error:
            # Our own cancellation of a handler, or one that it raised itself.
            return self._failed(attempt, definition, attempt.reason_to_stop() or error)
        except BaseException as error:  # noqa: BLE001  SystemExit of a handler is that handler's failure
            return self._failed(attempt, definition, error)

    # Called in threads.

    def _run_threads(self) -> None:
        """Run sync handlers until told to end; the body of a thread."""
        following = self._thread_jobs.get()
        while following is not None:
            # This one may block for long: the next thread takes what waits behind it, once it gets to run.
            self._fill()
            while (attempt := following) is not None:
                outcome = contextvars.copy_context().run(self._run_sync, attempt)
                self._end(attempt, outcome)
                following = self._next(is_async=False)
            with self._lock:
                self._used -= 1
                self._idle_threads += 1
            self._fill()
            following = self._thread_jobs.get()

    def _call(self, attempt: Attempt, definition: TaskDefinition) -> Outcome:
        function, signature = definition.function, definition.signature
        args = signature.decode(attempt.args)
        if definition.is_transactional:
            return self._once.transact(
                attempt, definition, lambda conn: function(**self._inject(attempt, signature, args, conn))
            )
        if attempt.idempotency_key is not None:
            if (outcome := self._once.begin(attempt, definition)) is not None:
                return outcome
            if attempt.is_takeover and (reconcile := definition.reconcile) is not None:
                attempt.is_reconciling = True
                value = reconcile.function(**self._inject(attempt, reconcile.signature, args))
                if value is not NOT_DONE:
                    return definition.success(value)
                attempt.is_reconciling = False
        return definition.success(function(**self._inject(attempt, signature, args)))

    def _run_sync(self, attempt: Attempt) -> Outcome:
        definition = attempt.definition
        try:
            self._begin(attempt)
            return self._call(attempt, definition)
        except BaseException as error:  # noqa: BLE001  whatever a handler raises ends its attempt, not the worker
            return self._failed(attempt, definition, error)

    # On either side.

    def _next(self, *, is_async: bool) -> Attempt | None:
        """Take the first of what waits into the slot of the one before, if it is of this kind."""
        with self._lock:
            if not self._backlog or self._backlog[0].definition.signature.is_async != is_async:
                return None
            attempt = self._backlog.popleft()
            self._running[attempt.serial] = attempt
            return attempt

    def _fill_unless_run(self) -> None:
        """Start the first of what waits, unless a task will get to it that goes through the backlog."""
        if not self._runners or self._is_thread_due():
            self._fill()

    def _fill(self) -> None:
        """Start the first of what waits in a slot of its own, if one is free. Safe from any thread."""
        with self._lock:
            if not self._backlog or self._used >= self._slots:
                return
            self._used += 1
            attempt = self._backlog.popleft()
            self._running[attempt.serial] = attempt
        if not attempt.definition.signature.is_async:
            self._hand_to_thread(attempt)
        elif threading.get_ident() == self._loop_thread:
            self._start_task(attempt)
        else:
            self._loop.call_soon_threadsafe(self._start_task, attempt)

    def _hand_to_thread(self, attempt: Attempt) -> None:
        with self._lock:
            needs_thread = self._idle_threads < 1 and self._threads < self._slots
            if needs_thread:
                self._threads += 1
            else:
                self._idle_threads -= 1
        if needs_thread:
            # Daemons: a handler that never returns must not keep the process from ending.
            thread = threading.Thread(
                target=self._run_threads, name=f"pgqueue-slot-{self._threads}", daemon=True
            )
            try:
                thread.start()
            except RuntimeError:
                # The system allows no more threads: the job waits for one of those there are.
                with self._lock:
                    self._threads -= 1
                    self._used -= 1
                    del self._running[attempt.serial]
                    self._backlog.appendleft(attempt)
                if not self._threads:
                    raise
                return
        self._thread_jobs.put(attempt)

    def _begin(self, attempt: Attempt) -> None:
        attempt.place = self._board.put(attempt.serial)
        attempt.started_at = time.monotonic()
        if attempt.started_at - attempt.sent_at > _LATE_SECONDS and self._is_too_late(attempt):
            if attempt.place >= 0:
                self._board.clear([attempt.place])
            attempt.place, attempt.started_at = -1, 0.0
            raise EndsAs(RELEASED)
        if (reason := attempt.reason_to_stop()) is not None:
            raise reason
        current_attempt.set((attempt.job_id, attempt.attempt, attempt.task_name))

    def _is_too_late(self, attempt: Attempt) -> bool:
        """Say whether an attempt that waited must not begin: its time is over, or it is not ours any more.

        The message that says so may wait behind a handler that blocks the loop.
        """
        waited = attempt.started_at - attempt.sent_at
        if attempt.seconds and waited >= attempt.seconds:
            return True
        return waited > STALE_SECONDS and self._board.is_revoked(attempt.serial)

    def _inject(
        self, attempt: Attempt, signature: Signature, args: dict[str, Any], conn: Any = None
    ) -> dict[str, Any]:
        """Add what the worker gives a handler to what its job does."""
        if not signature.context_names and not signature.connection_names:
            return args
        injected: dict[str, Any] = dict.fromkeys(signature.connection_names, conn)
        injected.update({name: self._context(attempt) for name in signature.context_names})
        return {**args, **injected}

    def _context(self, attempt: Attempt) -> JobContext:
        if attempt.context is None:
            headers = json.loads(attempt.headers) if attempt.headers else {}
            attempt.context = JobContext(
                job_id=attempt.job_id,
                task=attempt.task_name,
                queue=attempt.queue,
                attempt=attempt.attempt,
                max_attempts=attempt.max_attempts + attempt.crashes,
                timeout_seconds=attempt.seconds,
                headers=headers,
                idempotency_key=attempt.idempotency_key,
                is_takeover=attempt.is_takeover,
                remaining_seconds=attempt.remaining_seconds,
                is_lost=lambda: attempt.is_lost,
                is_cancel_requested=lambda: attempt.is_cancel_requested,
                report=lambda progress: self._note_progress(attempt, progress),
            )
        return attempt.context

    def _note_progress(self, attempt: Attempt, progress: dict[str, Any]) -> None:
        # Only the newest counts, and only now and then: a handler may say it in its innermost loop.
        self._progress[attempt.serial] = progress

    def _take_progress(self) -> dict[int, dict[str, Any]]:
        """Give what was said since the last time, without what is no JSON: neighbours travel with it."""
        said, self._progress = self._progress, {}
        return {
            serial: {
                name: clean(value) if isinstance(value, str) else value
                for name, value in progress.items()
                if isinstance(value, str) or _is_number(value)
            }
            for serial, progress in said.items()
        }

    def _failed(self, attempt: Attempt, definition: TaskDefinition, error: BaseException) -> Outcome:
        if isinstance(error, EndsAs):
            return error.outcome
        try:
            tries = attempt.attempt - attempt.crashes
            retry_seconds = definition.retry.delay_seconds(tries, error, random=random.random())
            is_unrecoverable = isinstance(error, definition.unrecoverable)
        except BaseException as failure:  # noqa: BLE001  the policy may be the user's code
            retry_seconds, is_unrecoverable = None, False
            with contextlib.suppress(Exception):
                error.add_note(f"its retry policy failed: {type(failure).__name__}: {failure}")
        if error.__traceback__ is not None:
            # The first frame is ours and tells nobody anything.
            error = error.with_traceback(error.__traceback__.tb_next)
        return outcome_of(
            error,
            retry_seconds=retry_seconds,
            is_unrecoverable=is_unrecoverable,
            is_unsure=attempt.is_reconciling or attempt.reason_to_stop() is not None,
        )

    def _end(self, attempt: Attempt, outcome: Outcome) -> None:
        """Note how an attempt ended. Safe from any thread."""
        seconds = time.monotonic() - attempt.started_at if attempt.started_at else 0.0
        self._running.pop(attempt.serial, None)
        if attempt.place >= 0:
            self._board.mark_ended(attempt.place)
        self._note_end(attempt.serial, attempt.place, seconds, outcome)

    def _note_end(self, serial: int, place: int, seconds: float, outcome: Outcome) -> None:
        """Have an end reported, together with others.

        Takes no lock: each step is atomic, and the list only grows while _flush takes its beginning.
        """
        self._ended.append((serial, place, seconds, outcome))
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon_threadsafe(self._plan_flush)

    def _plan_flush(self) -> None:
        if self._backlog and len(self._ended) < _FLUSH_JOBS:
            self._loop.call_later(_FLUSH_SECONDS, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        # First, so that whoever comes too late for this flush asks for another one.
        self._is_flush_due = False
        count = len(self._ended)
        ended = self._ended[:count]
        del self._ended[:count]
        plain = [(serial, seconds) for serial, _, seconds, outcome in ended if outcome is PLAIN_SUCCESS]
        serials, took = [serial for serial, _ in plain], [seconds for _, seconds in plain]
        others = [(one[0], one[2], one[3]) for one in ended if one[3] is not PLAIN_SUCCESS]
        try:
            self._report(serials, took, others)
        except (TypeError, ValueError):
            self._report_apart(serials, took, others)
        # Not before the report has left: a loop may queue it, and a handler block the loop before it is out.
        self._loop.call_soon(self._board.clear, [place for _, place, _, _ in ended if place >= 0])

    def _report_apart(self, serials: list[int], seconds: list[float], others: list[Ended]) -> None:
        """Report each outcome alone, since one of them cannot be encoded; that one without its text."""
        if serials:
            self._report(serials, seconds, [])
        for serial, took, outcome in others:
            try:
                self._report([], [], [(serial, took, outcome)])
            except (TypeError, ValueError) as error:
                reason = clean(f"how it ended could not be passed on: {type(error).__name__}: {error}")
                stripped = (
                    Outcome(outcome.ending, None, None, reason)
                    if outcome.ending is Ending.SUCCEEDED
                    else Outcome(outcome.ending, reason, None, None, outcome.is_unsure)
                )
                self._report([], [], [(serial, took, stripped)])

    def _tick(self) -> None:
        """Interrupt what is past its deadline, and give back what has waited too long."""
        now = time.monotonic()
        with self._lock:
            is_needed = bool(self._running or self._backlog or self._progress)
            # At once, for handlers end without asking for the lock.
            running = list(self._running.values())
            stale: list[Attempt] = []
            if self._backlog and now - self._backlog[0].sent_at > STALE_SECONDS:
                stale, self._backlog = list(self._backlog), deque()
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick) if is_needed else None
        for attempt in running:
            deadline_at = attempt.deadline_at
            if deadline_at is not None and now >= deadline_at and not attempt.is_timed_out:
                attempt.is_timed_out = True
                self._interrupt(attempt)
        self._release(stale)
        if self._progress and now >= self._progress_due_at:
            self._progress_due_at = now + PROGRESS_SECONDS
            self._report_progress(self._take_progress())


class _Steps:
    """A coroutine that runs in the task of whoever awaits this, but in a context of its own."""

    __slots__ = ("_context", "_coroutine", "_waits_for", "result")

    def __init__(self, coroutine: Coroutine[Any, Any, Outcome]) -> None:
        self._context = contextvars.copy_context()
        self._coroutine = coroutine
        self._waits_for: Any = None
        self.result: Outcome

    def begin(self) -> bool:
        """Run it until it waits for something, or to its end; says whether that was its end."""
        try:
            self._waits_for = self._context.run(self._coroutine.send, None)
        except StopIteration as end:
            self.result = end.value
            return True
        return False

    def __await__(self) -> Generator[Any, Any, Outcome]:
        run, coroutine, waits_for = self._context.run, self._coroutine, self._waits_for
        try:
            while True:
                try:
                    answer = yield waits_for
                except BaseException as error:  # noqa: BLE001  it is meant for the coroutine
                    waits_for = run(coroutine.throw, error)
                else:
                    waits_for = run(coroutine.send, answer)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, (int, float)) and math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def outcome_of_unknown(task_name: str, registry: TaskRegistry) -> Outcome:
    return outcome_of(
        UnknownTask(task_name, [definition.name for definition in registry]),
        retry_seconds=None,
        is_unrecoverable=False,
        is_unsure=False,
    )
