"""The pages of the programming interface: one for each module, written from the table below before a build."""

import ast
import importlib.util
import pathlib

import dropbayes

DOCS = pathlib.Path(__file__).parent.parent
SOURCE = pathlib.Path(dropbayes.__file__).parent

# Every public module, under the question it answers. tests/test_docs.py fails if one is missing.
GROUPS = {
    "Uncertainty of a network": [
        "predictive", "sampling", "linear", "likelihoods",
    ],
    "In other frameworks": ["guests", "guests.keras", "guests.pipelines"],
    "Language models": ["language", "language.callback"],
    "A table": ["estimators", "estimators.columns"],
    "The application": [
        "app", "app.models.model", "app.models.predictor", "app.tables", "app.report", "app.page", "app.cli",
        "app.serving", "app.distributed",
    ],
    "The theory": [
        "layers", "processes",
    ],
    "Judging and acting": [
        "scores", "scores.information", "calibration", "calibration.conformal", "decisions", "decisions.acquisition",
        "plots",
    ],
    "Training and files": ["training", "population", "runtime"],
    "The engine, for those who extend it": [
        "tracing",
        "sampling.functions", "sampling.plan", "sampling.strategies", "sampling.trials", "sampling.source",
        "sampling.inspection", "sampling.probes", "sampling.layouts", "sampling.profile", "sampling.perceptron",
        "sampling.masks", "sampling.inputs", "sampling.streaming", "sampling.settings",
        "tracing.outputs", "tracing.views", "tracing.states", "tracing.generators", "tracing.recorder", "tracing.watch",
        "predictive.prediction", "predictive.statistics",
    ],
}  # fmt: skip

# The names at the top level: five that everybody needs, then all others by task. tests/test_docs.py asks for each.
FIRST = ["predict", "evaluate", "sites", "DropoutRegressor", "load"]
TASKS = {
    "What a network's output means": [
        "Gaussian", "HeteroscedasticGaussian", "StudentT", "Quantiles", "Categorical", "Bernoulli", "Poisson",
    ],
    "Draws and functions": ["draws", "function_draw", "Sampling"],
    "Is it any good, and why is it unsure?": ["check", "doctor", "explain", "tune_dropout"],
    "Training": ["fit", "add_dropout", "negative_elbo", "weight_decay", "Prior"],
    "Tables and models": ["DropoutClassifier", "Predictor"],
}  # fmt: skip

# Names that a module hands on from another one, where they are described.
HANDED_ON = {
    "sampling": ["UncertaintyWarning", "UnsupportedStrategy"],
    "sampling.source": ["UnsupportedStrategy"],
    "sampling.profile": ["RowLayout", "Site"],
    "tracing": ["Site", "Sites"],
}


def modules():
    """The modules of the table that are there."""
    return [name for names in GROUPS.values() for name in names if importlib.util.find_spec(f"dropbayes.{name}")]


def summary(name):
    """The first line of a module's docstring."""
    path = SOURCE / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0]
    return " ".join(text.split())


def parts(name):
    """The modules of a package that has no names of its own: the experiments and the commands."""
    start = SOURCE / name / "__init__.py"
    if not start.exists() or "__all__" in start.read_text():
        return []
    return sorted(path.stem for path in start.parent.glob("[a-z]*.py"))


def page(name):
    """The reST of one module's page."""
    title = f"dropbayes.{name}"
    lines = [title, "=" * len(title), ""]
    for one in [name, *(f"{name}.{part}" for part in parts(name))]:
        if one != name:
            short = one.split(".")[-1]
            lines += [short, "-" * len(short), ""]
        lines += [f".. automodule:: dropbayes.{one}", "   :members:"]
        if name in HANDED_ON:
            lines.append(f"   :exclude-members: {', '.join(HANDED_ON[name])}")
        lines.append("")
    return "\n".join(lines)


def index():
    """The reST of the page that lists them all: the public names by task, then every module."""
    from docstrings import PLACES, converted

    def link(name):
        return f":py:obj:`db.{name} <{PLACES[name]}>`"

    names = []
    for name, place in sorted(PLACES.items(), key=lambda pair: pair[0].lower()):
        first = (getattr(dropbayes, name).__doc__ or "").strip().split("\n\n")[0]
        names.append((link(name), " ".join(converted(first.split("\n"), here=place)).strip()))
    described = dict(names)
    lines = ["API", "===", "", "``import dropbayes as db``. These five do most of the work:"]
    lines += _table([(link(name), described[link(name)]) for name in FIRST])
    listed = {*FIRST, *(name for members in TASKS.values() for name in members)}
    tasks = {**TASKS, "More": [name for name in PLACES if name not in listed]}
    for task, members in ((task, members) for task, members in tasks.items() if members):
        lines += ["", task, "-" * len(task), *_table([(link(name), described[link(name)]) for name in members])]
    lines += ["", "By module", "---------", "", "Everything, under the question it answers."]
    for group, members in GROUPS.items():
        present = [name for name in members if name in modules()]
        rows = [
            (f":doc:`dropbayes.{name} <{name}>`", converted([summary(name)], here=f"dropbayes.{name}")[0])
            for name in present
        ]
        lines += ["", group, "^" * len(group), *_table(rows)]
        lines += ["", ".. toctree::", "   :hidden:", "", *(f"   {name}" for name in present)]
    return "\n".join(lines) + "\n"


def _table(rows):
    cells = [line for left, right in rows for line in (f"   * - {left}", f"     - {right}")]
    return ["", ".. list-table::", "   :widths: 30 70", "   :class: api", "", *cells]


def write(app=None):
    """Writes the pages; one that has not changed is left alone, so that it need not be built again."""
    folder = DOCS / "api"
    folder.mkdir(exist_ok=True)
    pages = {"index": index(), **{name: page(name) for name in modules()}}
    for name, text in pages.items():
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
    for path in folder.glob("*.rst"):
        if path.stem not in pages:
            path.unlink()


def setup(app):
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
