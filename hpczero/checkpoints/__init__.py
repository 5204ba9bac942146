"""Checkpoints: our own format and the formats that others read and write."""
