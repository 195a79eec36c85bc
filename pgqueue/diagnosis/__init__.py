"""What is wrong, and what to do: with one job (`why`), with everything (`examine`)."""

from __future__ import annotations

from pgqueue.diagnosis.doctor import examine
from pgqueue.diagnosis.finding import Examination, Finding, Thresholds
from pgqueue.diagnosis.why import Cause, Why, why

__all__ = ["Cause", "Examination", "Finding", "Thresholds", "Why", "examine", "why"]
