"""The shape of the package: which module may import which, and that each has its tests."""

from __future__ import annotations

import ast
import functools
import graphlib
import os
import pathlib
import re
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parent.parent / "src" / "dropbayes"
TESTS = pathlib.Path(__file__).parent

# A module imports only from modules of a lower rank (docs/design.md, section 3).
RANK = {
    "runtime": -1,  # below zero: nothing of the mathematics
    "likelihoods": 0,
    "tracing": 1,
    "scores": 1,
    "decisions": 2,
    "calibration": 3,
    "layers": 3,
    "sampling": 3,
    "linear": 4,
    "plots": 4,
    "predictive": 5,
    "training": 5,
    "population": 5,
    "processes": 6,
    "language": 6,
    "guests": 6,
    "estimators": 6,
    "app": 9,  # its door
    "app.tables": 7,
    "app.models": 8,
    "app.report": 9,
    "app.page": 8,
    "app.serving": 9,
    "app.distributed": 9,
    "app.cli": 10,
    "__init__": 11,
    "__main__": 11,
}
MAX_ENTRIES = 20
MAX_LINES, MAX_MODULES, MAX_NAMES = 35_235, 205, 26  # a budget falls; what is added pays for its lines elsewhere

# Packages whose tests are still in one file.
UNDIVIDED: set[str] = set()


def modules_of(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Every module below `root` by its dotted name; a package is named by its folder."""
    dotted = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in root.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in dotted.items()}


def unit(module: str) -> str:
    """The top-level module or package that a dotted name is in, or the part of the application."""
    whole, _, rest = module.partition(".")
    return f"{whole}.{rest.split('.')[0]}" if whole == "app" and rest else whole


@functools.cache
def parsed_nodes(text: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(text)))


def nodes_of(path: pathlib.Path) -> list[ast.AST]:
    """The nodes of a file's syntax tree."""
    return parsed_nodes(path.read_text())


def imported_modules(path: pathlib.Path, modules: dict[str, pathlib.Path]) -> set[str]:
    """The modules of the library that a file imports, at module scope, in functions and for type checking alike."""
    dotted: list[str] = []
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            dotted += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            dotted += [name if name.removeprefix("dropbayes.") in modules else node.module for name in names]
    ours = {name.removeprefix("dropbayes.") for name in dotted if name.startswith("dropbayes.")}
    return {name for name in ours if name in modules} | ({"__init__"} if "dropbayes" in dotted else set())


def upward_imports(root: pathlib.Path) -> list[str]:
    """Imports between top-level units that do not point to a lower rank."""
    modules = modules_of(root)
    return [
        f"{name} (rank {RANK[unit(name)]}) imports {other} (rank {RANK[unit(other)]})"
        for name, path in modules.items()
        for other in imported_modules(path, modules)
        if unit(other) != unit(name) and RANK[unit(other)] >= RANK[unit(name)]
    ]


def import_cycle(root: pathlib.Path) -> list[str]:
    """A cycle of imports, lazy ones included; none if the list is empty."""
    modules = modules_of(root)
    graph = {name: imported_modules(path, modules) - {name, "__init__"} for name, path in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def private_definitions(nodes: list[ast.AST]) -> set[str]:
    """The names with one leading underscore that a module binds: functions, classes, variables and attributes."""
    names = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in nodes:
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def is_of_torch(node: ast.AST) -> bool:
    """Whether an attribute is looked up in torch, as in `torch._C._functorch`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id == "torch"


def private_reaches(root: pathlib.Path) -> list[str]:
    """Where a unit reads `something._private` or imports `_private` that another unit of the library defines."""
    files = {name: nodes_of(path) for name, path in modules_of(root).items()}
    defined: dict[str, set[str]] = {}
    for name, nodes in files.items():
        defined.setdefault(unit(name), set()).update(private_definitions(nodes))
    private = set().union(*defined.values())
    reaches = []
    for name, nodes in files.items():
        read = [node.attr for node in nodes if isinstance(node, ast.Attribute) and not is_of_torch(node)]
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dropbayes"):
                read += [alias.name for alias in node.names]
        foreign = private - defined[unit(name)]
        reaches += [f"{name}: {attribute}" for attribute in read if attribute in foreign]
    return reaches


def modules_without_tests(root: pathlib.Path, tests: pathlib.Path) -> list[str]:
    """Modules for which `tests` holds no file of the same place and name."""
    missing = []
    for name, path in modules_of(root).items():
        if path.stem in ("__init__", "__main__") or any(f"{name}.".startswith(f"{package}.") for package in UNDIVIDED):
            continue
        *folders, stem = name.split(".")
        if not tests.joinpath(*folders, f"test_{stem}.py").exists():
            missing.append(name)
    return missing


def test_every_top_level_entry_has_a_rank_and_they_are_few():
    entries = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries == {unit for unit in RANK if "." not in unit}
    assert len(entries) <= MAX_ENTRIES


def test_the_design_names_every_entry():
    layout = (TESTS.parent / "docs" / "design.md").read_text().split("```")[1]
    named = {word.strip(",/") for word in layout.split()}
    assert {unit.split(".")[-1] for unit in RANK} - {"__init__", "__main__"} <= named


def test_imports_point_one_way():
    assert not upward_imports(SOURCE)


def test_no_import_goes_round_in_a_circle():
    assert not import_cycle(SOURCE)


def test_private_names_stay_in_their_package():
    assert not private_reaches(SOURCE)


def test_other_packages_import_from_the_door_of_sampling():
    inside = re.compile(r"^from dropbayes\.sampling\.\w", re.MULTILINE)
    others = {name: path for name, path in modules_of(SOURCE).items() if unit(name) != "sampling"}
    assert others and not [name for name, path in others.items() if inside.search(path.read_text())]


def private_imports_of_the_application(root: pathlib.Path) -> list[str]:
    """Names that the application imports from the library and that their module does not offer."""
    modules, found = modules_of(root), []
    for name, path in modules.items():
        for node in nodes_of(path) if unit(name).startswith("app") else []:
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("dropbayes."):
                continue
            home = str(node.module).removeprefix("dropbayes.")
            offered = offered_names(modules[home]) if home in modules and not home.startswith("app") else None
            for alias in node.names if offered is not None else []:
                is_public = alias.name in offered or (not offered and not alias.name.strip("_").startswith("_"))
                if not is_public and f"{home}.{alias.name}" not in modules:
                    found.append(f"{name}: {home}.{alias.name}")
    return found


def offered_names(path: pathlib.Path) -> set[str]:
    """The names in the `__all__` of a module; none if it has no such list."""
    for node in nodes_of(path):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_application_stands_on_public_names():
    assert not private_imports_of_the_application(SOURCE)


def test_the_house_stays_within_its_budget():
    import dropbayes

    paths = list(SOURCE.rglob("*.py"))
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MAX_LINES
    assert len(paths) <= MAX_MODULES
    assert len([name for name in dropbayes.__all__ if name != "__version__"]) <= MAX_NAMES


def test_every_module_has_its_tests():
    assert not modules_without_tests(SOURCE, TESTS)


def planted(root: pathlib.Path, **files: str) -> pathlib.Path:
    """A package of the given files, `__` in a name standing for a folder."""
    for name, text in files.items():
        path = root.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_a_planted_upward_or_lazy_import_is_seen(tmp_path):
    lazy = "def f():\n    import dropbayes.app.cli\n"
    assert upward_imports(planted(tmp_path, scores=lazy, app__cli="")) == [
        f"scores (rank {RANK['scores']}) imports app.cli (rank {RANK['app.cli']})"
    ]
    assert len(upward_imports(planted(tmp_path, scores="import dropbayes", app__cli=""))) == 1


def test_a_planted_cycle_inside_a_package_is_seen(tmp_path):
    first = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dropbayes.report import b\n"
    second = "def f():\n    import dropbayes.report.a\n"
    cycle = import_cycle(planted(tmp_path, report__a=first, report__b=second))
    assert set(cycle) == {"report.a", "report.b"}


def test_a_planted_private_reach_is_seen(tmp_path):
    owner = "class A:\n    def _draw(self): ...\n"
    reader = "def f(a):\n    return a._draw()\n"
    assert private_reaches(planted(tmp_path, scores=owner, app__cli=reader)) == ["app.cli: _draw"]
    assert not private_reaches(planted(tmp_path, scores=owner + reader, app__cli=""))


def test_a_planted_import_of_a_name_that_is_not_offered_is_seen(tmp_path):
    library = '__all__ = ["shown"]\ndef shown(): ...\ndef hidden(): ...\n'
    root = planted(tmp_path, scores=library, app__cli="from dropbayes.scores import hidden, shown\n")
    assert private_imports_of_the_application(root) == ["app.cli: scores.hidden"]


def test_a_missing_test_file_is_seen(tmp_path):
    root = planted(tmp_path / "src", sampling__masks="", scores="")
    tests = planted(tmp_path / "tests", test_scores="")
    assert modules_without_tests(root, tests) == ["sampling.masks"]


def loaded_modules(script: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment
    ).stdout


FIRST_PREDICTIONS = """
import sys, numpy.random, torch
before = set(sys.modules)
import dropbayes
[getattr(dropbayes, name) for name in dropbayes.__all__ if not name.startswith(("Dropout", "Model", "load"))]
net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(4, 2, 4, batch_first=True), 1, enable_nested_tensor=False)
dropbayes.predict(net, torch.randn(3, 2, 4), n_draws=2)
print(sorted(set(sys.modules) - before))
x = numpy.arange(12.0).reshape(6, 2)
dropbayes.DropoutRegressor(hidden=(2,), n_steps=2, n_networks=2, weight_decay=1e-4).fit(x, x[:, 0]).predict(x)
print(sorted(set(sys.modules) - before))
"""


def test_a_first_prediction_loads_torch_and_numpy_only_and_no_compiler():
    of_a_network, of_a_table = map(ast.literal_eval, loaded_modules(FIRST_PREDICTIONS).splitlines())
    packages = {name.split(".")[0] for name in of_a_network if not name.startswith("_")}
    assert packages <= {"dropbayes", "torch", "numpy", *sys.stdlib_module_names}
    compilers = (
        "sympy",
        "triton",
        "torch._dynamo",
        "torch._inductor",
        "torch.fx.experimental",
        "torch.distributed",
        "torch.onnx",
    )
    assert not [name for name in of_a_table if name.startswith(compilers)]


def test_every_public_name_is_found_and_no_module_hides_one():
    import dropbayes

    modules = {path.stem for path in SOURCE.iterdir()}
    assert all(callable(getattr(dropbayes, name)) for name in dropbayes.__all__ if not name.startswith("_"))
    assert not modules & set(dropbayes.__all__)
    assert set(dropbayes.__all__) <= set(dir(dropbayes))
    assert dropbayes.calibration.__name__ == "dropbayes.calibration"
    with pytest.raises(AttributeError, match="no attribute 'sampel'"):
        _ = dropbayes.sampel


def test_import_waits_for_nothing():
    assert loaded_modules("import sys, dropbayes; print('torch' in sys.modules, 'numpy' in sys.modules)").split() == [
        "False",
        "False",
    ]
