"""Gives every Hydra app titanplug's groups, after its own.

Every app imports this, also one that wants nothing of titanplug: so schemas and resolvers are registered
when the first option of titanplug is read, and not before.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from hydra._internal.core_plugins import file_config_source
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.object_type import ObjectType
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin


class TitanplugSource(file_config_source.FileConfigSource):
    """A folder of options, and the schemas that they refer to as ``GROUP/schema/NAME``."""

    @staticmethod
    def scheme() -> str:
        """What the search path calls it."""
        return "titanplug"

    def is_config(self, config_path: str) -> bool:
        """Whether there is such a file or such a schema."""
        return super().is_config(config_path) or self._is_schema(config_path)

    def load_config(self, config_path: str) -> ConfigResult:
        """Read a file, or take a schema: Hydra reads a copy of the store, made before it held ours."""
        register_schemas()
        if not self._is_schema(config_path):
            return super().load_config(config_path)
        schema = ConfigStore.instance().load(self._normalize_file_name(config_path))
        path = f"{self.scheme()}://{self.path}"
        return ConfigResult(self.provider, path, schema.node, header={"package": schema.package})

    def _is_schema(self, config_path: str) -> bool:
        group, _, name = config_path.partition("/schema/")
        if not name or not self.is_group(group):
            return False
        register_schemas()
        return ConfigStore.instance().get_type(self._normalize_file_name(config_path)) is ObjectType.CONFIG


def register_schemas() -> None:
    """Import titanplug's schemas and register them."""
    from titanplug import config

    config.register_schemas()


class TitanplugSearchPath(SearchPathPlugin):
    """Appends titanplug's folder: an option of the app goes before one of the same name there."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder, but for titanplug's own commands, which have it already."""
        spec = find_spec("titanplug")
        if spec is None or spec.origin is None:
            return
        package = Path(spec.origin).parent
        folder = package / "conf"  # installed
        if not folder.is_dir():
            folder = package.parent / "conf"  # in a checkout
        known = {"pkg://titanplug.conf", str(folder), f"file://{folder}"}
        if all(item.path not in known for item in search_path.get_path()):
            search_path.append(provider="titanplug", path=f"{TitanplugSource.scheme()}://{folder}")
