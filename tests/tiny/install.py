"""Puts the tests' own recipes and family in the place of the product's; imports no torch."""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

from mptrain import files

HERE = Path(__file__).parent
_product_folder = files.folder


def folder(name: str) -> Path:
    return HERE / "recipes" if name == "recipes" else _product_folder(name)


class TaskFinder(importlib.abc.MetaPathFinder):
    """Adds our folder to the package mptrain.tasks when it is imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "mptrain.tasks":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec.submodule_search_locations.append(str(HERE / "tasks"))
        return spec


def family() -> None:
    """Makes the family importable as mptrain.tasks.tiny."""
    if (tasks := sys.modules.get("mptrain.tasks")) is not None:
        if str(HERE / "tasks") not in tasks.__path__:
            tasks.__path__.append(str(HERE / "tasks"))
    else:
        sys.meta_path.insert(0, TaskFinder())
