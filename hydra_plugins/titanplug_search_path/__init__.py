"""Gives every Hydra app titanplug's groups, after its own. Each imports this: nothing heavy at the top."""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

from titanplug.config import find_conf, register_schemas


class TitanplugSearchPath(SearchPathPlugin):
    """Appends titanplug's folder: an option of the app goes before one of the same name there."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the folder, and make the schemas known that its files refer to."""
        register_schemas()
        folder = find_conf()
        path = folder if folder.startswith("pkg://") else f"file://{folder}"
        if all(item.path not in (path, folder) for item in search_path.get_path()):
            search_path.append(provider="titanplug", path=path)
