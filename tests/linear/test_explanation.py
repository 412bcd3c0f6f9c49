"""The shares of the variance: they sum to it, and the planted cause has the largest."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dropbayes as db
from dropbayes.linear import explain, shapley
from tests.sampling.zoo import build
from tests.sampling.zoo.specimens import Module


def table(n_features=5):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(n_features, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 16), nn.Tanh(),
                        nn.Dropout(0.4), nn.Linear(16, 2)).double()  # fmt: skip
    return net, torch.randn(7, n_features, dtype=torch.float64)


def test_all_shares_sum_to_the_linear_variance():
    net, x = table()
    why, variance = explain(net, x), db.predict(net, x, method="linear").epistemic.sum(1)
    torch.testing.assert_close(why.variance, variance)
    torch.testing.assert_close(why.by_site.sum(1), variance)
    torch.testing.assert_close(sum(shares.flatten(1).sum(1) for shares in why.by_unit), variance)
    torch.testing.assert_close(why.by_feature.sum(1) + why.baseline, variance)
    mean = db.predict(net, x.mean(0, keepdim=True), method="linear").epistemic.sum()
    torch.testing.assert_close(why.baseline, mean.expand(7))


def test_one_output_or_the_largest_is_explained():
    net, x = table()
    every = db.predict(net, x, method="linear")
    torch.testing.assert_close(explain(net, x, output=1).variance, every.epistemic[:, 1])
    largest = every.epistemic.gather(1, every.mean.argmax(1, keepdim=True))[:, 0]
    torch.testing.assert_close(explain(net, x, output="largest").variance, largest)


def test_the_share_of_a_site_is_the_variance_with_its_dropout_alone():
    net, x = table()
    why = explain(net, x, output=0)
    for index, other in ((0, 5), (1, 2)):
        alone = nn.Sequential(*(nn.Identity() if place == other else layer for place, layer in enumerate(net)))
        expected = db.predict(alone, x, method="linear").epistemic[:, 0]
        torch.testing.assert_close(why.by_site[:, index], expected)


@pytest.mark.slow
def test_units_have_the_shape_of_the_mask():
    net, x = build("convnet_with_batch_norm")
    why = explain(net, x)
    assert [tuple(shares.shape) for shares in why.by_unit] == [(3, 4, 1, 1), (3, 4)]
    net, x = build("drop_connect")
    assert explain(net, x).by_unit[0].shape == (4, 3, 6)


@pytest.mark.parametrize("shape", [lambda x: (len(x),), lambda x: ()], ids=["of each row", "of all rows"])
def test_a_mask_of_one_number_has_one_share(shape):
    def forward(m, x):
        return m.o(m.a(x) * m.d(x.new_ones(shape(x))).unsqueeze(-1))

    torch.manual_seed(0)
    net, x = Module(forward, a=nn.Linear(3, 4), d=nn.Dropout(0.3), o=nn.Linear(4, 2)), torch.randn(3, 3)
    why = explain(net, x)
    assert why.by_unit[0].shape == (3,) and why.by_site.shape == (3, 1)
    torch.testing.assert_close(why.variance, db.predict(net, x, method="linear").epistemic.sum(1))


def test_positions_share_what_their_masks_add():
    net = Module(lambda m, x: F.dropout(x, 0.5, m.training).sum(1)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    why = explain(net, x, positions=True)
    torch.testing.assert_close(why.by_position, x.square().sum(2))
    net, x = build("bert_sdpa")
    why = explain(Module(lambda m, **named: m.net(**named).logits, net=net), x, positions=True)
    assert why.by_position.shape == (3, 5)
    assert why.by_position[0, :3].sum() > 5 * why.by_position[0, 3:].sum()  # the rest is padding
    assert (why.by_position.sum(1) <= why.variance).all() and why.by_feature is None


def test_sequence_first_positions_are_found():
    net = Module(lambda m, x: F.dropout(x, 0.5, m.training).sum(0)).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    torch.testing.assert_close(
        explain(net, x, positions=True, sampling=db.Sampling(row_axis=1)).by_position, x.square().sum(2).T
    )


def test_the_share_of_a_feature_is_exact_where_features_do_not_interact():
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1)).double()
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = (net[1].weight[0] * x).square().detach()
    found = explain(net, x, baseline=torch.zeros(3))
    torch.testing.assert_close(found.by_feature, expected)
    torch.testing.assert_close(found.baseline, torch.zeros(4, dtype=torch.float64), atol=1e-12, rtol=0)


def test_many_baselines_are_averaged_and_inputs_of_one_column_move_together():
    x, baseline = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[0.0, 0.0, 0.0], [2.0, 0.0, 0.0]])
    rows = baseline.repeat_interleave(16, 0)  # each is taken as often
    torch.testing.assert_close(shapley(lambda z: z.sum(1), x, rows), torch.tensor([[0.0, 2.0, 3.0]]))
    both = shapley(lambda z: torch.stack([z[:, 1] * z[:, 2], z[:, 0]], 1), x, rows, columns=torch.tensor([0, 1, 1]))
    torch.testing.assert_close(both, torch.tensor([[[0.0, 0.0], [6.0, 0.0]]]))


@pytest.mark.parametrize(("n_columns", "n_orders"), [(2, 64), (127, 64), (200, 40), (600, 16)])
def test_many_columns_have_fewer_orders_and_shares_that_sum_to_the_difference(n_columns, n_orders):
    rows = []

    def value(mixed):
        rows.append(len(mixed))
        return mixed[:, :2].prod(1) + mixed.sum(1)

    x = torch.ones(1, n_columns, dtype=torch.float64)
    shares = shapley(value, x, torch.zeros(n_columns))
    assert rows == [n_orders * (n_columns + 1)]
    torch.testing.assert_close(shares.sum(), value(x)[0])
    torch.testing.assert_close(shares[0, 2:], x[0, 2:])


@pytest.mark.parametrize("n_rows", [1, 2, 3, 5, 31, 32])
def test_each_of_a_few_baselines_counts_about_as_often(n_rows):
    starts = torch.eye(n_rows, dtype=torch.float64)  # of the sum of weights, that of each row
    weights = torch.arange(1.0, n_rows + 1, dtype=torch.float64)
    sums = shapley(lambda rows: rows @ weights, torch.zeros(1, n_rows, dtype=torch.float64), starts).sum()
    counts = torch.arange(32) % n_rows
    torch.testing.assert_close(sums, -weights[counts].mean())


def test_a_row_is_explained_against_typical_rows():
    net, x = table()
    typical = torch.randn(40, 5, dtype=torch.float64)
    why = explain(net, x, baseline=typical)
    taken = typical[torch.linspace(0, 39, 32).round().long()]
    expected = db.predict(net, taken, method="linear").epistemic.sum(1).mean()
    torch.testing.assert_close(why.baseline, expected.expand(7))


def test_an_image_has_first_order_shares():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 1)).double()
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64)
    why = explain(net, x, baseline=torch.zeros(3, 2, 2))
    terms = (net[2].weight[0] * x.flatten(1)).square().detach().view(x.shape)
    torch.testing.assert_close(why.by_feature, 2 * terms)  # the derivative of a square
    torch.testing.assert_close(why.baseline, -terms.flatten(1).sum(1))


def test_the_first_order_shares_of_all_outputs_are_the_sum_of_those_of_each():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Dropout2d(0.5), nn.Flatten(), nn.Linear(16, 2)).double()
    x = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    each = [explain(net, x, output=number).by_feature for number in range(2)]
    torch.testing.assert_close(explain(net, x).by_feature, sum(each))


def test_a_planted_cause_is_ranked_first():
    """The network is a sum of one-feature functions, of which one drops all of its units: it alone is unsure."""
    found = 0
    for seed in range(8):
        torch.manual_seed(seed)
        cause, x = seed % 6, torch.randn(10, 6)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(6))

        def forward(m, x, cause=cause):
            parts = [layer(x[:, [i]]) for i, layer in enumerate(m.layers) if i != cause]
            hidden = m.layers[cause][:2](3 * x[:, [cause]])
            return sum(parts) + m.layers[cause][2](F.dropout(hidden, 0.5, m.training))

        found += int(explain(Module(forward, layers=layers), x).by_feature.abs().mean(0).argmax()) == cause
    assert found == 8


def test_it_prints_and_renders_the_largest_shares_with_names():
    net, x = table(12)
    text = str(explain(net, x, names=[f"column <{i}>" for i in range(12)]))
    assert text.startswith("Explanation(7 rows, mean epistemic variance ")
    assert "2 dropout" in text and "(baseline)" in text and "(4 more)" in text and "column <" in text
    assert explain(net, x, names=np.arange(12)).names == tuple(map(str, range(12)))  # as columns of a DataFrame are
    page = explain(net, x, names=[f"column <{i}>" for i in range(12)])._repr_html_()
    assert page.startswith("<pre>Explanation(7 rows") and "column &lt;" in page and "column <" not in page


def test_plots_show_bars_and_maps():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    net, x = table()
    why = explain(net, x)
    ax = why.plot("feature", row=2)
    widths = [patch.get_window_extent().width for patch in ax.patches]
    assert widths == sorted(widths, reverse=True) and max(widths) > 0
    assert len(why.plot().patches) == 2
    image = explain(nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(12, 1)), torch.randn(4, 3, 2, 2))
    assert image.plot("feature").images[0].get_array().shape == (2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"output": 2}, "`output` must be one of the 2 numbers"),
        ({"output": "first"}, "`output` must be one of the 2 numbers"),
        ({"baseline": float("nan") * torch.zeros(3)}, "`baseline` must be finite"),
        ({"baseline": torch.zeros(3)}, "`baseline` must have the shape of a row"),
        ({"names": ["a"]}, "`names` must name each feature"),
        ({"names": 3}, "`names` must be a list of the features' names; got 3"),
        ({"positions": True}, "`positions`"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    net, x = table()
    with pytest.raises((ValueError, TypeError), match=words):
        explain(net, x, **options)


def test_a_part_without_shares_is_refused_with_a_remedy():
    net, x = table()
    with pytest.raises(ValueError, match="positions=True"):
        explain(net, x).parts("position")


@pytest.mark.parametrize("broken", ["weights", "rows"])
def test_a_variance_that_is_no_number_is_refused(broken):
    net, x = table()
    with torch.no_grad():
        (net[0].weight if broken == "weights" else x)[0, 0] = torch.nan
    with pytest.raises(ValueError, match="`net` gave NaN or infinite outputs"):
        explain(net, x)


def test_the_labels_of_a_batch_are_left_out_as_in_predict():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.head = nn.Dropout(0.3), nn.Linear(4, 1)

        def forward(self, x, labels=None):
            out = self.head(self.drop(x))
            return out if labels is None else (out - labels).square().mean()

    net, x = Model(), torch.randn(5, 4)
    given, labelled = (explain(net, one) for one in ({"x": x}, {"x": x, "labels": torch.zeros(5, 1)}))
    assert torch.equal(given.by_unit[0], labelled.by_unit[0])
