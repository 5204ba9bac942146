"""DeepSpeed's module of this name: what a training script does to partitioned parameters."""

from hpczero.partition.gathered import GatheredParameters

__all__ = ["GatheredParameters"]
