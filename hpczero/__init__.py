"""ZeRO for people whose cluster speaks MPI.

[Note: the road of a parameter]
partition/grouping chooses which parameters travel together, partition/layout cuts their flat run
into shards, partition/bucket gathers and reduces it when the hooks of partition/hooks say so,
through a Courier of comm/; partition/optimizer updates what this rank owns; engine ties all this
together.
"""

from hpczero.comm import watch as _watch

_watch.install()  # before anything can fail on one rank only

from hpczero import zero  # noqa: E402
from hpczero.config import Config  # noqa: E402
from hpczero.engine import Engine  # noqa: E402
from hpczero.errors import ConfigError, Disagreement, Overflow  # noqa: E402
from hpczero.initialize import (  # noqa: E402
    add_config_arguments,
    init_distributed,
    initialize,
)
from hpczero.partition.gathered import GatheredParameters  # noqa: E402
from hpczero.partition.lamb import Lamb  # noqa: E402

__version__ = "0.1.0"

__all__ = [
    "Config",
    "ConfigError",
    "Disagreement",
    "Engine",
    "GatheredParameters",
    "Lamb",
    "Overflow",
    "__version__",
    "add_config_arguments",
    "init_distributed",
    "initialize",
    "zero",
]
