"""The Hydra configuration of titanplug, installed as ``titanplug.conf``."""
