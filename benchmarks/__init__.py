"""Benchmarks of hpczero beside its peers: `python -m benchmarks` lists, runs and tabulates them."""
