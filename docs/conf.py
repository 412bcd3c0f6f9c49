"""The settings of the documentation; `make docs` builds it. Nothing is fetched while building or reading."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

import dropbayes  # noqa: E402

project = "dropbayes"
author = "The dropbayes developers"
copyright = author
release = version = dropbayes.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "api_pages",
    "docstrings",
    "live_page",
    "long_names",
    "mathml",
]
# Only the page of running times: the gallery's style sheets begin with sg_ too.
exclude_patterns = [
    "_build",
    "_ext",
    "gallery/*.py",
    "gallery/*.ipynb",
    "**/sg_execution_times*",
    "sg_execution_times*",
]
nitpicky = True
nitpick_ignore_regex = [
    # Types of other libraries and of Python: their documentation is not fetched, so nothing here could be linked to.
    (r"py:class", r"(torch|numpy|sklearn|pyarrow|pandas)\..*"),
    (
        r"py:class",
        r"(Tensor|Distribution|Axes|pa\.\w+|collections\.abc\.\w+|contextlib\.\w+|types\.\w+|os\.PathLike|pathlib\.Path)",
    ),
    # Records of the engine, which is not public, and records that a public signature mentions by their module.
    (r"py:class", r"dropbayes\.sampling\.\w+\.\w+"),
    (
        r"py:class",
        r"dropbayes\.(estimators\.(extrapolation\.(Extrapolation|Bounds)|process\.Process|atoms\.Atoms|trees\.Trees|noise\.StudentNoise)"
        r"|estimators\.(transforms\.TargetTransform|recalibration\.Recalibration|ensembles\.Ensemble)"
        r"|app\.tables\.training\.(TrainingRows|Reading)"
        r"|language\.uncertainty\.Text|app\.models\.model\.Frame|population\.heads\.Head|processes\.networks\.Step"
        r"|app\.serving\.served\.ServedModel|training\.rows\.(Tensor|Loaded)Rows|estimators\.columns\.(notation\.Notation|inference\.Problem)"
        r"|linear\.(passes\.LinearPlan|perceptrons\.MomentsPlan|control\.ControlledPlan))",
    ),
    # Aliases of types, type variables, and the halves of subscripted types.
    (
        r"py:class",
        r"(Array|NumpyArray|Columns|Part|EnsembleModel|_Arguments|dropbayes\.runtime\.\w+\._(Item|Method|Result))",
    ),
    (
        r"py:class",
        r"(dict\[~typing\.Any|(collections\.abc\.)?Mapping\[str|tuple\[float|Literal\['\w+'?)",
    ),
]

# Text ---------------------------------------------------------------------------------------------------------------
myst_enable_extensions = [
    "attrs_block",
    "colon_fence",
    "deflist",
    "dollarmath",
    "fieldlist",
]
myst_heading_anchors = 3
myst_dmath_double_inline = True
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# The programming interface --------------------------------------------------------------------------------------------
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autoclass_content = "class"
napoleon_numpy_docstring = False
napoleon_use_rtype = False
autodoc_inherit_docstrings = False
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries_show_parents = "hide"

# The gallery ----------------------------------------------------------------------------------------------------------
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parent / "examples"),
    "gallery_dirs": "gallery",
    "filename_pattern": r"/plot_",
    "ignore_pattern": r"(co2_demo|__init__)\.py",
    "remove_config_comments": True,
    "download_all_examples": False,
    "show_memory": False,
    "show_signature": False,
    "min_reported_time": 10_000,
    "write_computation_times": False,
    "within_subsection_order": "ExampleTitleSortKey",
    "image_srcset": ["2x"],
}

# Looks ----------------------------------------------------------------------------------------------------------------
html_theme = "furo"
html_title = f"dropbayes {release}"
html_favicon = "_static/favicon.svg"
html_logo = "_static/favicon.svg"
html_static_path = ["_static"]
html_css_files = ["dropbayes.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_math_renderer = "mathml"
pygments_style = "friendly"
pygments_dark_style = "native"
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#1f5f99",
        "color-brand-content": "#1f5f99",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7cb7ee",
        "color-brand-content": "#7cb7ee",
    },
}


def _edit_link(app, pagename, templatename, context, doctree):
    """Links a page to its source in the clone that it was built in; pages written by the build have none."""
    if "/" not in pagename and (HERE / f"{pagename}.md").exists():
        context["theme_source_edit_link"] = f"../../{pagename}.md"


def setup(app):
    app.connect("html-page-context", _edit_link, priority=100)
