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
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

from pgqueue.errors import UnknownTask
from pgqueue.model.arguments import Signature
from pgqueue.model.context import JobContext
from pgqueue.model.outcome import RELEASED, Outcome, clean, outcome_of
from pgqueue.model.task import NOT_DONE, TaskDefinition, TaskRegistry
from pgqueue.runtime.attempt import Attempt
from pgqueue.runtime.board import Board
from pgqueue.runtime.log import current_attempt
from pgqueue.runtime.once import EndsAs, Once

# A job that was sent ahead and could not start for this long goes back: the slots turned out to be
# busy with long jobs, and another worker may have room.
STALE_SECONDS = 1.0
PROGRESS_SECONDS = 1.0
_TICK_SECONDS = 0.05

# (serial, seconds the handler ran, outcome)
Ended = tuple[int, float, Outcome]


class Engine:
    """Runs attempts in at most `slots` slots.

    `report` is called on the loop with those that ended, `report_progress` with what handlers said of
    how far they are, by serial.
    """

    def __init__(
        self,
        registry: TaskRegistry,
        slots: int,
        report: Callable[[list[Ended]], None],
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
        # Taken by the loop and by handler threads: a thread that ends a job takes the next one
        # itself, since a detour over the loop costs more than a small job does.
        self._lock = threading.Lock()
        self._backlog: deque[Attempt] = deque()
        self._used = 0
        self._running: dict[int, Attempt] = {}
        self._progress: dict[int, dict[str, Any]] = {}
        self._progress_due_at = 0.0
        self._ended: list[tuple[Attempt, Ended]] = []
        self._is_flush_due = False
        self._is_stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread_jobs: SimpleQueue[tuple[Attempt, TaskDefinition] | None] = SimpleQueue()
        self._threads = 0
        self._idle_threads = 0
        # Ticks only while there is something to look after: an idle engine costs nothing.
        self._ticker: asyncio.TimerHandle | None = None

    # Called on the loop.

    def submit(self, messages: Iterable[list[Any]]) -> None:
        """Take attempts over; each is reported exactly once."""
        now = time.monotonic()
        with self._lock:
            self._backlog.extend(Attempt(message, now) for message in messages)
        if self._ticker is None:
            self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick)
        self._fill()

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
            self._is_stopping = True
            waiting, self._backlog = list(self._backlog), deque()
        self._end([(attempt, RELEASED) for attempt in waiting])

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
        self._end([(attempt, RELEASED) for attempt in waiting])
        return running

    def _interrupt(self, attempt: Attempt) -> None:
        # A thread cannot be interrupted, but for a statement it waits for: its handler may ask its
        # context, and past the grace the parent kills the process.
        if attempt.task is not None:
            attempt.task.cancel()
        elif (cancel := attempt.cancel_statement) is not None:
            cancel()

    def _fill(self) -> None:
        """Start what waits while slots are free."""
        while True:
            with self._lock:
                if not self._backlog or self._used >= self._slots:
                    return
                attempt = self._backlog.popleft()
                self._used += 1
            self._start(attempt)

    def _start(self, attempt: Attempt) -> None:
        """Start an attempt whose slot is taken."""
        self._running[attempt.serial] = attempt
        definition = self._registry.get(attempt.task_name)
        if definition is None:
            self._end([(attempt, outcome_of_unknown(attempt, self._registry))])
            self._free_slot()
        elif definition.is_async:
            task = self._loop.create_task(self._run_async(attempt, definition))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._hand_to_thread(attempt, definition)

    def _hand_to_thread(self, attempt: Attempt, definition: TaskDefinition) -> None:
        with self._lock:
            needs_thread = self._idle_threads < 1 and self._threads < self._slots
            if needs_thread:
                self._threads += 1
            else:
                self._idle_threads -= 1
        self._thread_jobs.put((attempt, definition))
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
                    self._idle_threads -= 1
                if not self._threads:
                    raise

    def _free_slot(self) -> None:
        with self._lock:
            self._used -= 1
        self._loop.call_soon(self._fill)

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

    async def _run_async(self, attempt: Attempt, definition: TaskDefinition) -> None:
        try:
            # Only from here on may it be cancelled: a task cancelled before its first step never runs at
            # all, and its attempt would end without a word. Who asked before now is heard in _begin.
            attempt.task = asyncio.current_task()
            try:
                self._begin(attempt, definition)
                outcome = await self._call_async(attempt, definition)
            except asyncio.CancelledError as error:
                outcome = self._interrupted(attempt, definition, error)
            except BaseException as error:  # noqa: BLE001  SystemExit of a handler is that handler's failure
                outcome = self._failed(attempt, definition, error)
            self._end([(attempt, outcome)])
        finally:
            self._free_slot()

    # Called in threads.

    def _run_threads(self) -> None:
        """Run sync handlers until told to end; the body of each slot's thread."""
        while (job := self._thread_jobs.get()) is not None:
            attempt, definition = job
            while True:
                outcome = contextvars.copy_context().run(self._run_sync, attempt, definition)
                self._end([(attempt, outcome)])
                following = self._next_for_thread()
                if following is None:
                    break
                attempt, definition = following

    def _next_for_thread(self) -> tuple[Attempt, TaskDefinition] | None:
        """Keep the slot and take the next sync job, or give the slot back."""
        with self._lock:
            if self._backlog and not self._is_stopping:
                attempt = self._backlog[0]
                definition = self._registry.get(attempt.task_name)
                if definition is not None and not definition.is_async:
                    self._backlog.popleft()
                    self._running[attempt.serial] = attempt
                    return attempt, definition
            self._used -= 1
            self._idle_threads += 1
            has_more = bool(self._backlog)
        if has_more:
            self._loop.call_soon_threadsafe(self._fill)
        return None

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

    def _run_sync(self, attempt: Attempt, definition: TaskDefinition) -> Outcome:
        try:
            self._begin(attempt, definition)
            return self._call(attempt, definition)
        except BaseException as error:  # noqa: BLE001  whatever a handler raises ends its attempt, not the worker
            return self._failed(attempt, definition, error)

    # On either side.

    def _begin(self, attempt: Attempt, definition: TaskDefinition) -> None:
        attempt.definition = definition
        attempt.place = self._board.put(attempt.serial)
        attempt.started_at = time.monotonic()
        if (reason := attempt.reason_to_stop()) is not None:
            raise reason
        current_attempt.set((attempt.job_id, attempt.attempt, attempt.task_name))

    def _inject(
        self, attempt: Attempt, signature: Signature, args: dict[str, Any], conn: Any = None
    ) -> dict[str, Any]:
        """Add what the worker gives a handler to what its job does."""
        injected: dict[str, Any] = dict.fromkeys(signature.connection_names, conn)
        injected.update({name: self._context(attempt) for name in signature.context_names})
        return {**args, **injected} if injected else args

    def _context(self, attempt: Attempt) -> JobContext:
        if attempt.context is None:
            headers = json.loads(attempt.headers) if attempt.headers else {}
            attempt.context = JobContext(
                job_id=attempt.job_id,
                task=attempt.task_name,
                queue=attempt.queue,
                attempt=attempt.attempt,
                max_attempts=attempt.max_attempts + attempt.crashes,
                timeout_seconds=attempt.seconds or 0.0,
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
                if isinstance(value, str) or (isinstance(value, (int, float)) and math.isfinite(value))
            }
            for serial, progress in said.items()
        }

    def _interrupted(
        self, attempt: Attempt, definition: TaskDefinition, error: asyncio.CancelledError
    ) -> Outcome:
        """Tell our own cancellation of a handler from one it raised itself."""
        return self._failed(attempt, definition, attempt.reason_to_stop() or error)

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

    def _end(self, ended: list[tuple[Attempt, Outcome]]) -> None:
        """Note how attempts ended; they are reported together, soon. Safe from any thread."""
        if not ended:
            return
        now = time.monotonic()
        with self._lock:
            for attempt, outcome in ended:
                self._running.pop(attempt.serial, None)
                if attempt.place >= 0:
                    self._board.mark_ended(attempt.place)
                seconds = now - attempt.started_at if attempt.started_at else 0.0
                self._ended.append((attempt, (attempt.serial, seconds, outcome)))
            is_first = not self._is_flush_due
            self._is_flush_due = True
        if is_first:
            self._loop.call_soon_threadsafe(self._flush)

    def _flush(self) -> None:
        with self._lock:
            ended, self._ended = self._ended, []
            self._is_flush_due = False
        self._report([report for _, report in ended])
        for attempt, _ in ended:
            if attempt.place >= 0:
                self._board.clear(attempt.place)

    def _tick(self) -> None:
        """Interrupt what is past its deadline, and give back what has waited too long."""
        now = time.monotonic()
        with self._lock:
            is_needed = bool(self._running or self._backlog or self._progress)
            overdue = [
                attempt
                for attempt in self._running.values()
                if attempt.deadline_at is not None and now >= attempt.deadline_at and not attempt.is_timed_out
            ]
            stale: list[Attempt] = []
            if self._backlog and now - self._backlog[0].arrived_at > STALE_SECONDS:
                stale, self._backlog = list(self._backlog), deque()
        self._ticker = self._loop.call_later(_TICK_SECONDS, self._tick) if is_needed else None
        for attempt in overdue:
            attempt.is_timed_out = True
            self._interrupt(attempt)
        self._end([(attempt, RELEASED) for attempt in stale])
        if self._progress and now >= self._progress_due_at:
            self._progress_due_at = now + PROGRESS_SECONDS
            self._report_progress(self._take_progress())


def outcome_of_unknown(attempt: Attempt, registry: TaskRegistry) -> Outcome:
    return outcome_of(
        UnknownTask(attempt.task_name, [definition.name for definition in registry]),
        retry_seconds=None,
        is_unrecoverable=False,
        is_unsure=False,
    )
