"""Plots: what is drawn is what was given, on the axes given, and it can be told apart without colour."""

import matplotlib

matplotlib.use("Agg")

import os
import pathlib
import subprocess
import sys

import matplotlib.colors
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from dropbayes import calibration, plots, scores


@pytest.fixture
def ax():
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)


def curves(ax):
    return [line for line in ax.lines if line.get_gid() == "curve"]


def lightness(colour):
    return np.dot(matplotlib.colors.to_rgb(colour), [0.299, 0.587, 0.114])


def values(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_band_spans_two_standard_deviations_in_the_order_of_x(ax):
    x, mean, std = torch.tensor([2.0, 0.0, 1.0]), torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.3, 0.1, 0.2])
    assert plots.predictive_band(x, mean, std=std, draws=torch.zeros(4, 3), observed=(x, mean), ax=ax) is ax
    wide, narrow = (collection.get_paths()[0].vertices for collection in ax.collections)
    assert wide[:, 1].max() == pytest.approx(3.6) and wide[:, 1].min() == pytest.approx(0.8)
    assert narrow[:, 1].max() == pytest.approx(3.3)
    mean_line = next(line for line in ax.lines if line.get_label() == "mean")
    np.testing.assert_allclose(mean_line.get_xydata(), [[0, 1], [1, 2], [2, 3]])
    assert sum(line.get_label() == "draws" or str(line.get_label()).startswith("_") for line in ax.lines) == 4


def test_the_fills_of_a_band_differ_in_lightness(ax):
    x = torch.arange(3.0)
    plots.predictive_band(x, x, std=x, ax=ax)
    wide, narrow = (lightness(collection.get_facecolor()[0][:3]) for collection in ax.collections)
    assert wide - narrow > 0.1


def test_reliability_diagram_draws_the_curve_with_two_standard_errors(ax):
    curve = calibration.ReliabilityCurve(
        torch.tensor([0.5, 0.8]), torch.tensor([0.4, 0.9]), torch.tensor([100.0, 64.0])
    )
    plots.reliability_diagram(curve, label="net", ax=ax)
    np.testing.assert_allclose(curves(ax)[0].get_xydata(), [[0.5, 0.4], [0.8, 0.9]], rtol=1e-6)
    bars = ax.collections[0].get_segments()
    np.testing.assert_allclose([bar[1, 1] - bar[0, 1] for bar in bars], [0.2, 0.2], rtol=1e-5)


def test_several_curves_on_one_axes_differ_without_colour(ax):
    for seed in range(4):
        plots.risk_coverage_diagram(scores.risk_coverage(values(50, seed=seed), values(50)), label=str(seed), ax=ax)
    looks = {(str(line.get_linestyle()), line.get_marker()) for line in curves(ax)}
    assert len(curves(ax)) == 4
    assert len(looks) == 4
    assert len([text for text in ax.get_legend().get_texts() if "no ranking" in text.get_text()]) == 1


def test_risk_coverage_diagram_names_the_area(ax):
    curve = scores.risk_coverage(values(50), values(50, seed=1))
    plots.risk_coverage_diagram(curve, label="entropy", ax=ax)
    np.testing.assert_allclose(curves(ax)[0].get_ydata(), curve.risk)
    assert f"entropy (area {curve.area.item():.3g})" in [text.get_text() for text in ax.get_legend().get_texts()]


def test_rejection_diagram_shows_the_share_of_loss_left_after_deferring(ax):
    # Ten errors among a hundred rows, exactly the ten most uncertain: deferring a tenth leaves nothing.
    loss = (torch.arange(100) >= 90).double()
    plots.rejection_diagram(scores.risk_coverage(torch.arange(100.0), loss), deferred=0.05, ax=ax)
    x, y = curves(ax)[0].get_data()
    assert y[np.abs(x - 0.1).argmin()] == 0
    assert y[np.abs(x - 0.05).argmin()] == pytest.approx(0.5)
    assert "defer 5%: 50% remains" in [text.get_text() for text in ax.texts]


def test_uncertainty_histogram_marks_new_points_with_their_percentile(ax):
    training = 0.2 + 1.8 * values(400)
    reference = calibration.uncertainty_reference(training)
    plots.uncertainty_histogram(training, reference=reference, new=torch.tensor([1.0, 5.0]), ax=ax)
    expected = reference.percentile(torch.tensor(1.0, dtype=torch.float64)).item()
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts[-2:] == [f"new point 1: percentile {expected:.1f}", "new point 5: above percentile 99.9"]
    area = sum(patch.get_width() * patch.get_height() for patch in ax.patches)
    assert area == pytest.approx(1.0)


def test_new_axes_are_made_when_none_are_given():
    axes = plots.reliability_diagram(calibration.quantile_reliability(values(200)))
    assert axes.figure is not None
    plt.close(axes.figure)


GALLERY = sorted((pathlib.Path(__file__).parent.parent / "examples").glob("plot_*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("script", GALLERY, ids=lambda path: path.stem)
def test_gallery_script_writes_a_figure_into_the_folder_given(script, tmp_path):
    environment = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, script, tmp_path], check=True, env=environment, capture_output=True)
    figures = list(tmp_path.iterdir())
    assert figures
    for figure in figures:  # none is blank
        if figure.suffix == ".svg":
            assert figure.read_text().count("<path") > 20
        else:
            assert plt.imread(figure).std() > 0.05


def test_a_band_of_two_columns_is_refused_and_not_drawn_wrong():
    with pytest.raises(ValueError, match=r"`mean` must be \[row\]"):
        plots.predictive_band(torch.arange(3.0), torch.zeros(3, 2), std=torch.ones(3))
    with pytest.raises(ValueError, match="`draws` must be"):
        plots.predictive_band(torch.arange(3.0), torch.zeros(3), std=torch.ones(3), draws=torch.zeros(2, 4))


def test_outcomes_that_are_not_one_for_each_x_are_refused():
    with pytest.raises(ValueError, match="`observed` must be x and y of one length; got 3 and 2"):
        plots.predictive_band(
            torch.arange(3.0), torch.zeros(3), std=torch.ones(3), observed=(torch.ones(3), torch.ones(2))
        )


def test_a_rejection_diagram_without_errors_is_refused():
    with pytest.raises(ValueError, match="`curve` must have a positive total loss"):
        plots.rejection_diagram(scores.risk_coverage(torch.arange(3.0), torch.zeros(3)))


def test_a_share_of_deferred_rows_above_all_is_refused():
    with pytest.raises(ValueError, match="`deferred` must lie between 0 and 1; got 30"):
        plots.rejection_diagram(scores.risk_coverage(torch.arange(3.0), torch.ones(3)), deferred=30)


def test_values_that_no_picture_can_show_are_refused_by_name(ax):
    uncertainty = torch.linspace(0.1, 1, 50)
    reference = calibration.uncertainty_reference(uncertainty)
    calls = {
        "training_uncertainty": lambda: plots.uncertainty_histogram([0.1, np.nan], reference=reference, ax=ax),
        "new": lambda: plots.uncertainty_histogram(uncertainty, reference=reference, new=[np.inf], ax=ax),
    }
    for name, call in calls.items():
        with pytest.raises(ValueError, match=f"^`{name}` must"):
            call()
    assert not ax.lines and not ax.collections and not ax.patches


def test_a_deviation_below_zero_and_a_percentile_that_is_none_are_refused():
    with pytest.raises(ValueError, match="`std` must be at least 0; got -1 to -1"):
        plots.predictive_band([0.0, 1.0], [0.0, 1.0], std=[-1.0, -1.0])
    for wrong in (float("nan"), -1.0, 101.0):
        with pytest.raises(ValueError, match="`percentile / 100` must lie between 0 and 1"):
            plots.percentile_text(wrong)
