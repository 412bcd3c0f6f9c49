"""The shape of the package: which module may import which, and that each has its tests."""

import ast
import os
import pathlib
import subprocess
import sys

import pytest

SOURCE = pathlib.Path(__file__).parent.parent / "src" / "dropbayes"

# A module imports only from modules of a lower rank (docs/design.md, section 3).
RANK = {
    "precision": 0,
    "likelihoods": 0,
    "variational": 0,
    "covariances": 0,
    "masks": 0,
    "information": 0,
    "scores": 0,
    "trees": 0,
    "views": 0,
    "streaming": 0,
    "fused_recurrence": 0,
    "processes": 1,
    "layers": 1,
    "recurrent": 2,
    "calibration": 1,
    "decisions": 1,
    "acquisition": 1,
    "operations": 2,
    "sequential": 2,
    "conversion": 2,
    "objective": 3,
    "anatomy": 3,
    "mapping": 4,
    "sampling": 5,
    "statistics": 6,
    "predictive": 7,
    "evaluation": 8,
    "training": 8,
    "population": 8,
    "storage": 8,
    "estimators": 9,
    "plots": 9,
    "experiments": 10,
    "tables": 10,
    "report": 11,
    "cli": 12,
    "__init__": 13,
    "__main__": 13,
}


def module_name(path: pathlib.Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_modules(path: pathlib.Path) -> set[str]:
    """The dropbayes modules imported at module scope or inside functions, type-checking blocks included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("dropbayes.")}
        elif isinstance(node, ast.ImportFrom) and node.module == "dropbayes":
            names |= {alias.name for alias in node.names if alias.name in RANK}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dropbayes."):
            names.add(node.module.split(".")[1])
    return names


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_one_way(path):
    name = module_name(path)
    assert name in RANK, f"give {name} a rank"
    upward = {other for other in imported_modules(path) if other != name and RANK[other] >= RANK[name]}
    assert not upward, f"{name} (rank {RANK[name]}) imports {upward}"


@pytest.mark.parametrize("path", sorted(SOURCE.glob("[a-z]*.py")), ids=lambda p: p.stem)
def test_every_module_has_its_tests(path):
    assert (pathlib.Path(__file__).parent / f"test_{path.stem}.py").exists()


def test_all_but_the_estimators_load_torch_and_numpy_only():
    script = (
        "import sys, torch, numpy; before = set(sys.modules); import dropbayes; "
        "[getattr(dropbayes, name) for name in dropbayes.__all__ if not name.startswith('Dropout')]; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before if not m.startswith('_')}))"
    )
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    third_party = set(ast.literal_eval(out.stdout)) - set(sys.stdlib_module_names) - {"dropbayes", "torch", "numpy"}
    assert not third_party, third_party


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
    script = "import sys, dropbayes; print('torch' in sys.modules, 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert out.stdout.split() == ["False", "False"]
