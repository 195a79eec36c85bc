"""Mutants: the same queue with one thing done wrong each, beside the scenarios in which that must be found.

A module for each kind of promise. The functions are altered by replacing text of the real ones in
the drill's own database; a worker or a client by a habit of its own.
"""

from tests.faults.mutants import attempts, fences, holders, leaks, losses, ticks, waits
from tests.faults.mutants.mutant import MUTANTS, Mutant

__all__ = ["MUTANTS", "Mutant", "attempts", "fences", "holders", "leaks", "losses", "ticks", "waits"]
