"""Parallelism on torch alone: no Lightning, no Hydra."""
