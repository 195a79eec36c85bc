"""The application that jobs of other languages are for."""

from __future__ import annotations

import pgqueue

app = pgqueue.App()


@app.task
def echo(text: str) -> str:
    return text


@app.task(queue="mail", priority=2, max_attempts=3, timeout_seconds=45, concurrency_key="user:{user_id}")
def send_welcome(user_id: int) -> str:
    return f"welcome, {user_id}"


@app.task(unique_key="report:{day}")
def report(day: str) -> str:
    return day
