"""The exceptions that no builtin class says better."""

from __future__ import annotations

from collections.abc import Sequence


class ConfigError(ValueError):
    """Report all problems of a configuration at once."""

    def __init__(self, problems: Sequence[str], origin: str = "the config") -> None:
        self.problems = list(problems)
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} in {origin}:"
        super().__init__("\n".join([head, *(f"  - {problem}" for problem in self.problems)]))


class Overflow(FloatingPointError):
    """Report that fp16 overflows at the smallest loss scale; raised alike on all ranks."""

    reporter = 0


class Disagreement(RuntimeError):
    """Report that ranks don't do the same; raised alike on all ranks, printed by the reporter."""

    def __init__(self, message: str, reporter: int = 0) -> None:
        self.reporter = reporter
        super().__init__(message)


class CheckpointError(RuntimeError):
    """Report that a checkpoint can't be saved or loaded; raised alike on all ranks."""

    def __init__(self, message: str, reporter: int = 0) -> None:
        self.reporter = reporter
        super().__init__(message)
