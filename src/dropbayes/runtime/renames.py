"""Earlier names that keep working: modules that have moved, functions and methods that were renamed."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import ParamSpec, TypeVar

__all__ = ["RenamedModules", "earlier_arguments", "earlier_name"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


class RenamedModules:
    """An importer, for `sys.meta_path`, of modules that have moved within a package.

    `import dropbayes.recurrent` gives `dropbayes.layers.recurrent` itself.
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


def earlier_name(name: str, function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function or method under its earlier name: it warns, and calls the function.

    Args:
        name: The earlier name.
        function: The function under its present name.

    Example:
        >>> def square(x):
        ...     return x * x
        >>> squared = earlier_name("squared", square)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     squared(3), str(caught[0].message)
        (9, '`squared` is now called `square`; the earlier name will be removed.')
    """

    @functools.wraps(function)
    def renamed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        _warn(name, function.__name__)
        return function(*args, **kwargs)

    renamed.__name__, renamed.__doc__ = name, f"The earlier name of `{function.__name__}`."
    return renamed


def earlier_arguments(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """A decorator of a function whose keyword arguments were renamed: it warns, and passes the earlier ones on.

    Args:
        **names: The present name of each argument, by its earlier one.

    Example:
        >>> @earlier_arguments(times="power")
        ... def raised(x, *, power):
        ...     return x**power
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     raised(3, times=2), str(caught[0].message)
        (9, '`times` is now called `power`; the earlier name will be removed.')
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def renamed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for before in names.keys() & kwargs.keys():
                _warn(before, names[before])
                kwargs[names[before]] = kwargs.pop(before)
            return function(*args, **kwargs)

        return renamed

    return decorate


def _warn(before: str, now: str) -> None:
    message = f"`{before}` is now called `{now}`; the earlier name will be removed."
    warnings.warn(message, DeprecationWarning, stacklevel=3)
