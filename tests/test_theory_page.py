"""The page of the theory has every equation of the paper, and names only tests and code that exist."""

import importlib
import pathlib
import re

LABELS = [
    *("NN:reg", "NN:class", "L:dropout", "generative_model_reg", "generative_model_class", "predictive_dist", "L:VI"),
    *("generative_model_approx", "cond-prob-with-aux", "variaitonal_dist_1", "variaitonal_dist_2"),
    *("variaitonal_dist_3", "L:GP-VI", "reparam_reg", "L:GP-MC", "L:GP-MC-reg", "reparam_class"),
    *("weightdecay_tau_relation", "tau_weightdecay_relation", "L:GP-MC-reg-lengthscale", "L:GP-MC-reg-SVI"),
    "predictive_dist_reg",
]
PROPOSITIONS = ["KL_mixture_of_Gaussians", "lower_bound_class", "mean", "var"]


def test_the_theory_page_has_every_equation_and_names_only_tests_and_code_that_exist():
    tests = pathlib.Path(__file__).parent
    page = (tests.parent / "docs" / "theory.md").read_text()
    for label in [f"eq:{name}" for name in LABELS] + [f"prop:{name}" for name in PROPOSITIONS]:
        assert f"`{label}`" in page, label
    written = "\n".join(path.read_text() for path in tests.rglob("test_*.py"))
    for name in set(re.findall(r"`(test_\w+)`", page)):
        assert f"def {name}(" in written, name
    for module, name in set(re.findall(r"`(likelihoods|training|layers|processes)\.(\w+)", page)):
        assert hasattr(importlib.import_module(f"dropbayes.{module}"), name), (module, name)
