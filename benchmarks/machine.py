"""What results say of the machine that they were measured on."""

from __future__ import annotations

from pathlib import Path


def cpu() -> str:
    """Return the processor's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), "unknown")
