"""What is installed: requirements that are true, a wheel and an sdist with all that they should hold and nothing else.

The tests that build and install are slow; `make build-check` runs them.
"""

import email
import importlib
import json
import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import dropbayes

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(file):
    """The version of each package that a constraints file pins, by normalised name."""
    lines = [line for line in (ROOT / file).read_text().split("\n") if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): Version(version) for name, version in (line.split("==") for line in lines)}


def requirements(*extras):
    texts = [*PROJECT["dependencies"], *(text for extra in extras for text in EXTRAS[extra])]
    return [Requirement(text) for text in texts if not text.startswith("dropbayes")]


# Requirements ---------------------------------------------------------------------------------------------------------------


def test_the_minimum_constraints_are_the_lower_bounds():
    pinned = pins("constraints-minimum.txt")
    used = requirements(*(set(EXTRAS) - {"dev", "docs", "guests", "test"}))
    for requirement in used:
        (bound,) = requirement.specifier
        assert bound.operator == ">=" and Version(bound.version) == pinned[requirement.name], str(requirement)


def test_the_constraints_meet_every_requirement():
    pinned = pins("constraints.txt")
    for requirement in requirements(*(set(EXTRAS) - {"guests"})):  # these have an environment of their own
        assert requirement.specifier.contains(pinned[requirement.name.lower()]), str(requirement)


def test_dev_has_every_extra_but_the_heavy_engines_and_the_rivals_of_a_benchmark():
    (everything,) = [text for text in EXTRAS["dev"] if text.startswith("dropbayes")]
    assert Requirement(everything).extras == set(EXTRAS) - {"dev", "ray", "spark", "compare", "guests"}


def test_the_start_page_names_extras_that_exist_and_no_other():
    (line,) = re.findall(r"pip install '\.\[plot\]' +# and: (.*)", (ROOT / "docs/index.md").read_text())
    inner = {"plot", "compare", "docs", "test", "dev"}  # the first, and those of this project's own work
    assert set(line.split(", ")) == set(EXTRAS) - inner


def test_the_version_is_one():
    assert dropbayes.__version__ == PROJECT["version"]
    assert f"version: {PROJECT['version']}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_building_needs_no_torch():
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"] == ["hatchling>=1.27"]


def test_every_third_party_import_of_the_library_is_declared():
    """A top-level import that no requirement brings would break the first user without our environment."""
    import_names = {"scikit-learn": "sklearn", "prometheus-client": "prometheus_client"}
    declared = {import_names.get(r.name, r.name) for r in requirements(*EXTRAS)}
    # by scikit-learn, typer, jinja2, uvicorn
    brought = {"scipy", "joblib", "click", "markupsafe", "h11"}
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        found |= set(re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), re.MULTILINE))
    third_party = {name for name in found if name not in sys.stdlib_module_names and _is_module(name)}
    assert third_party - declared - brought <= {"dropbayes", "__future__"}


def _is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


# What is run elsewhere --------------------------------------------------------------------------------------------------------


def workflow(name="check"):
    import yaml

    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


@pytest.mark.parametrize("name", ["check", "release"])
def test_foreign_actions_are_pinned_and_tokens_can_only_read_unless_a_job_says_why(name):
    steps = [step for job in workflow(name)["jobs"].values() for step in job["steps"] if "uses" in step]
    assert steps and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step["uses"]) for step in steps)
    assert workflow(name)["permissions"] == {"contents": "read"}
    assert "PIP_EXTRA_INDEX_URL" not in workflow(name).get("env", {})  # it could offer any package
    commands = [step.get("run", "") for job in workflow(name)["jobs"].values() for step in job["steps"]]
    foreign = [line for text in commands for line in re.findall(r"pip install (?:--quiet )?([a-z].*)", text)]
    assert all("==" in packages for packages in foreign)
    written = {job: set(entry.get("permissions", {})) for job, entry in workflow(name)["jobs"].items()}
    assert written.get("publish", set()) <= {"id-token"}
    assert not any(rights for job, rights in written.items() if job not in ("publish", "attest"))


def test_a_release_is_attested_with_its_bill_of_materials_before_it_is_published():
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["needs"] == "attest" and jobs["attest"]["needs"] == "build"
    attested = [step["uses"].partition("@")[0] for step in jobs["attest"]["steps"]]
    assert {"actions/attest-build-provenance", "actions/attest-sbom"} <= set(attested)
    assert "cyclonedx-py" in " ".join(step.get("run", "") for step in jobs["build"]["steps"])


def test_the_workflow_runs_every_check_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    steps = [step.get("run", "") for job in workflow()["jobs"].values() for step in job["steps"]]
    checks = set(re.findall(r"make ([a-z-]+)", "\n".join(steps)))
    assert checks == targets - {"bench", "clean", "image-requirements", "lint"}  # `make test` lints


def test_the_workflow_tests_the_oldest_and_the_newest_versions():
    cells = workflow()["jobs"]["test"]["strategy"]["matrix"]["include"]
    pythons, torches = ([Version(cell[name]) for cell in cells] for name in ("python", "torch"))
    assert pythons == sorted(pythons) and torches == sorted(torches)
    assert f">={pythons[0]}" == PROJECT["requires-python"]
    assert torches[-1] == pins("constraints.txt")["torch"]
    (oldest,) = {step.get("with", {}).get("python-version") for step in workflow()["jobs"]["minimum"]["steps"]} - {None}
    assert f">={oldest}" == PROJECT["requires-python"]  # with the oldest torch: `make test-minimum`


def test_the_hooks_run_the_pinned_ruff():
    import yaml

    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (revision,) = [repo["rev"] for repo in hooks if repo["repo"].endswith("/ruff-pre-commit")]
    assert Version(revision) == pins("constraints.txt")["ruff"]


# What is built ----------------------------------------------------------------------------------------------------------------


def run(*command, **keywords):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel and the sdist, built in isolation as `python -m build` does; the wheel is made from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built):
    names = {name for name in zipfile.ZipFile(built[0]).namelist() if ".dist-info/" not in name}
    source = ROOT / "src"
    files = {str(path.relative_to(source)) for path in (source / "dropbayes").rglob("*") if path.is_file()}
    assert names == {name for name in files if "__pycache__" not in name}
    assert "dropbayes/py.typed" in names


@pytest.mark.slow
def test_the_metadata_are_right(built):
    from markdown_it import MarkdownIt
    from trove_classifiers import classifiers

    wheel = zipfile.ZipFile(built[0])
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    metadata = email.message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert (metadata["Name"], metadata["Version"]) == ("dropbayes", PROJECT["version"])
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert metadata["Requires-Python"] == ">=3.11" and metadata["Description-Content-Type"] == "text/markdown"
    names = {url.split(", ")[0] for url in metadata.get_all("Project-URL")}
    assert {"Homepage", "Documentation", "Issues", "Changelog", "Paper"} <= names
    assert set(metadata.get_all("Classifier")) <= set(classifiers)
    assert set(metadata.get_all("Provides-Extra")) == set(EXTRAS)
    page = MarkdownIt().render(metadata.get_payload())
    assert "<h1>dropbayes</h1>" in page
    assert not re.search(r'(?:href|src|srcset)="(?!https://|#)', page)  # an index has the page alone
    assert "dropbayes = dropbayes.app.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_the_sdist_holds_what_is_under_version_control_and_nothing_else(built):
    with tarfile.open(built[1]) as archive:
        sizes = {member.name.partition("/")[2]: member.size for member in archive.getmembers() if member.isfile()}
    names = set(sizes)
    tracked = set(run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").split("\n")) - {""}
    left_out = {name for name in tracked if name.startswith((".ci/", ".github/", ".pre-commit-config.yaml"))}
    assert names - {"PKG-INFO"} == tracked - left_out
    others = [name for name in names if not name.startswith("experiments/results/")]  # arrays of its own, no data
    assert not [
        name for name in others if re.search(r"(^|/)(out|data|_build|dist|\.venv)/|\.(gz|npz|csv|ipynb)$", name)
    ]
    assert max(sizes.values()) < 400_000


# What is installed --------------------------------------------------------------------------------------------------------------

CORE = """
import importlib.util, json, sys
present = [n for n in ("matplotlib", "pandas", "statsmodels", "transformers") if importlib.util.find_spec(n)]
import dropbayes as db, numpy as np
lazy = "torch" not in sys.modules
x = np.linspace(-2, 2, 60)[:, None]
model = db.DropoutRegressor(n_steps=200, n_networks=1, drop_prob=0.05, weight_decay=1e-5, random_state=0)
mean, std = model.fit(x, np.sin(x[:, 0])).predict(np.array([[0.5], [6.0]]), return_std=True)
classifier = db.DropoutClassifier(n_steps=50, n_networks=1, drop_prob=0.05, weight_decay=1e-5).fit(x, x[:, 0] > 0)
model.save("model.dropbayes")
again = db.DropoutRegressor.load("model.dropbayes").predict(x)
print(json.dumps({
    "present": present, "lazy": lazy, "mean": mean.tolist(), "std": std.tolist(), "where": db.__file__,
    "accuracy": classifier.score(x, x[:, 0] > 0), "same": bool((again == model.predict(x)).all()),
}))
"""


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory):
    """The Python of a new environment that has the wheel, what it requires, and no extra."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", built[0])
    return python


@pytest.mark.slow
def test_the_wheel_works_alone(installed, tmp_path):
    result = json.loads(run(installed, "-I", "-c", CORE, cwd=tmp_path))
    assert result["present"] == [] and result["lazy"] and result["same"]
    assert str(installed.parent.parent) in result["where"]
    assert abs(result["mean"][0] - 0.479) < 0.15 and result["std"][1] > result["std"][0] > 0  # sin ½; unsure at 6
    assert result["accuracy"] > 0.9
    assert "No broken requirements" in run(installed, "-m", "pip", "check")


@pytest.mark.slow
def test_the_command_runs_its_demonstration_without_extras(installed, tmp_path):
    assert "fit" in run(installed.parent / "dropbayes", "--help", cwd=tmp_path)
    printed = run(installed.parent / "dropbayes", "demo", "--out", "out", cwd=tmp_path)
    assert "diabetes" in printed.lower() and "95 % interval" in printed  # CO2 comes with statsmodels, which is an extra
    assert (tmp_path / "out" / "report.html").read_text().startswith("<!doctype html>")
    assert "drop" in run(installed.parent / "dropbayes", "explain", "out/model", cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("extra", sorted(set(EXTRAS) - {"dev"}))
def test_every_extra_resolves(installed, built, extra):
    wanted = f"dropbayes[{extra}] @ {built[0].as_uri()}"
    out = run(installed, "-m", "pip", "install", "--dry-run", "--constraint", ROOT / "constraints.txt", wanted)
    assert "Would install" in out
