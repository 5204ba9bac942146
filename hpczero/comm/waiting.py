"""Wait for other ranks without taking the core from one that still computes."""

from __future__ import annotations

import os
import time

from mpi4py import MPI

YIELD_SECONDS = 1e-3
CROWDED_YIELD_SECONDS = 5e-3
"""Where ranks outnumber cores, those in step arrive later; yielding gives them the core."""
SLEEP_SECONDS = 1e-4


def wait_politely(request: MPI.Request, patience: float = YIELD_SECONDS) -> None:
    """Wait without taking the core from a rank that still computes.

    A blocking call spins for as long as the last rank computes. Here: yield the core at every test
    for `patience` seconds, in which ranks in step arrive, then sleep between tests.
    """
    end = time.perf_counter() + patience
    while not request.Test():
        if time.perf_counter() < end:
            os.sched_yield()
        else:
            time.sleep(SLEEP_SECONDS)
