"""Modules under their earlier names: `import dropbayes.recurrent` gives `dropbayes.layers.recurrent` itself."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["RenamedModules"]


class RenamedModules:
    """An importer, for `sys.meta_path`, of modules that have moved within a package.

    The module is imported under its present name and registered in `sys.modules` under both, so that a class has one
    identity under either path. Submodules of a moved package move with it.

    Args:
        package: The package in which modules have moved.
        names: The present name of each module, by its earlier one; both relative to the package.
    """

    def __init__(self, package: str, names: Mapping[str, str]) -> None:
        self._names = {f"{package}.{before}": f"{package}.{now}" for before, now in names.items()}

    def present_name(self, name: str) -> str | None:
        """The present name of a module that has moved; None for all others."""
        for before, now in self._names.items():
            if name == before or name.startswith(f"{before}."):
                return now + name.removeprefix(before)
        return None

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if self.present_name(name) is None:
            return None
        # A loader by duck typing: importing importlib.abc to inherit from takes longer than the rest of the package.
        return ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        sys.modules[name] = importlib.import_module(self.present_name(name) or name)
