"""The list of packages; everything else is in pyproject.toml.

Setuptools can map a folder to another package name or find packages by itself, but not both: the
configuration in ``conf/`` is shipped as ``titanplug.conf``, the recipes as ``titanplug.recipes``.
"""

from setuptools import find_namespace_packages, find_packages, setup

setup(
    packages=[
        *find_packages(include=["titanplug", "titanplug.*"]),
        "titanplug.conf",
        "titanplug.recipes",
        *find_namespace_packages(include=["hydra_plugins.*"]),
    ],
    package_dir={"titanplug.conf": "conf", "titanplug.recipes": "recipes"},
)
