"""Wait for other ranks without taking the core from one that still computes."""

from __future__ import annotations

import os
import time

from mpi4py import MPI

YIELD_SECONDS = 1e-3
CROWDED_YIELD_SECONDS = 2e-4
"""Where ranks outnumber cores, those in step arrive later; yielding gives them the core."""
SLEEP_SECONDS = 1e-4
LONGEST_SLEEP_SECONDS = 2e-3
"""For those who wait for other ranks: an eighth of the time waited so far, up to this."""


def wait_politely(
    requests: list[MPI.Request], patience: float = YIELD_SECONDS, moving: bool = False
) -> None:
    """Wait without taking the core from a rank that still computes.

    A blocking call spins for as long as the last rank computes. Here: yield the core at every test
    for `patience` seconds, in which ranks in step arrive, then sleep between tests; longer and
    longer, unless data is `moving` across nodes, which it does only while somebody tests.
    """
    start = time.perf_counter()
    while not MPI.Request.Testall(requests):
        waited = time.perf_counter() - start
        if waited < patience:
            os.sched_yield()
        else:
            longest = SLEEP_SECONDS if moving else LONGEST_SLEEP_SECONDS
            time.sleep(max(SLEEP_SECONDS, min(waited / 8, longest)))
