"""Sweeps: each job of `--multirun` in processes of its own. Imports neither torch nor Lightning.

``hydra/launcher=titanplug`` is :class:`titanplug.sweep.launcher.SweepLauncher`; `titanplug train -m` uses it.
"""
