"""How a prediction is read and how it shows itself."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import predictive_covariance


def predicted(n_rows=12, n_outputs=1, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, n_outputs))
    return db.predict(net, torch.randn(n_rows, 3), **options)


def test_an_interval_holds_its_share_of_a_gaussian():
    prediction = predicted(likelihood=db.Gaussian(precision=4.0))
    lower, upper = prediction.interval(0.8)
    normal = torch.distributions.Normal(prediction.mean, prediction.std)
    torch.testing.assert_close(normal.cdf(upper) - normal.cdf(lower), torch.full((12, 1), 0.8))
    torch.testing.assert_close((lower + upper) / 2, prediction.mean)


@pytest.mark.parametrize("coverage", [0.0, 1.0, 90])
def test_an_interval_of_an_impossible_coverage_is_refused(coverage):
    with pytest.raises(ValueError, match="`coverage` must lie strictly between 0 and 1"):
        predicted().interval(coverage)


def test_classes_have_no_interval():
    with pytest.raises(ValueError, match="classes have probabilities"):
        predicted(n_outputs=3, likelihood=db.Categorical()).interval()


def test_rows_are_picked_by_index_slice_and_mask():
    prediction = predicted(keep_draws=True, n_draws=7)
    for index, n_rows in ((-1, 1), (slice(2, 5), 3), (prediction.mean[:, 0] > prediction.mean.median(), 6)):
        some = prediction[index]
        assert len(some) == n_rows and some.draws.shape == (7, n_rows, 1)
    torch.testing.assert_close(prediction[3].std, prediction.std[3:4])


def test_arrays_and_tables_hold_the_same_numbers():
    prediction = predicted(likelihood=db.Gaussian(precision=4.0))
    assert prediction.numpy()["std"].tolist() == prediction.std.tolist()
    table = prediction.to_pandas()
    assert list(table) == ["mean", "std", "epistemic_std", "aleatoric_std"] and len(table) == 12
    assert math.isclose(table["std"][4], float(prediction.std[4]))
    classes = predicted(n_outputs=3, likelihood=db.Categorical()).to_pandas()
    statistics = ["entropy", "expected_entropy", "variation_ratio", "mutual_information"]
    assert list(classes) == ["probability_0", "probability_1", "probability_2", *statistics]
    drawn = predicted(quantiles=[0.1, 0.9]).to_pandas()
    assert list(drawn)[-2:] == ["quantile_0.1", "quantile_0.9"] and (drawn["quantile_0.1"] < drawn["mean"]).all()


def test_a_map_has_a_column_for_every_number():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 3, 1), nn.Dropout(0.5))
    prediction = db.predict(net, torch.randn(2, 1, 2, 2), likelihood=db.Categorical())
    table = prediction.to_pandas()
    assert [name for name in table if name.startswith("entropy")] == [f"entropy_{i}" for i in range(4)]
    assert table["probability_11"][1] == float(prediction.mean[1, 2, 1, 1])


@pytest.mark.parametrize("name", ["entropy", "expected_entropy", "variation_ratio", "mutual_information"])
def test_statistics_of_classes_say_which_likelihood_is_missing(name):
    with pytest.raises(AttributeError, match=rf"`(mutual_information|entropy|{name})` needs a likelihood of classes"):
        getattr(predicted(likelihood=db.Gaussian(1.0)), name)
    assert not hasattr(predicted(), name)


def test_a_prediction_shows_itself_in_a_few_lines():
    prediction = predicted(n_rows=1000)
    assert len(repr(prediction)) < 120 and "1,000 rows" in repr(prediction)
    assert repr(prediction[:1]).startswith("Prediction(1 row of shape (1,), ")
    assert str(prediction).count("\n") <= 13 and "…" in str(prediction)
    assert prediction._repr_html_().count("<tr>") == 12


def test_several_outputs_are_read_by_their_fields():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.d = nn.Linear(3, 2), nn.Dropout(0.5)

        def forward(self, x):
            return {"a": self.d(self.a(x)), "b": x}

    prediction = db.predict(Two(), torch.randn(4, 3))
    assert "(4, 2), (4, 3)" in repr(prediction) and str(prediction) == repr(prediction)
    with pytest.raises(TypeError, match="several tensors"):
        prediction[0]


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.3), nn.Linear(20, 3))


def test_the_covariance_between_outputs_is_that_of_proposition_four(net):
    prediction = db.predict(net.double(), torch.randn(4, 2).double(), likelihood=db.Gaussian(4.0), keep_draws=True)
    got, draws = prediction.covariance, prediction.draws
    torch.testing.assert_close(got, predictive_covariance(draws, precision=4.0))
    expected = torch.cov(draws[:, 0].T, correction=0) + 0.25 * torch.eye(3, dtype=torch.float64)
    torch.testing.assert_close(got[0], expected)


def test_a_prediction_with_its_draws_has_a_covariance_whose_diagonal_is_the_variance(net):
    x = torch.randn(5, 2)
    prediction = db.predict(net, x, n_draws=50, likelihood=db.Gaussian(4.0), keep_draws=True)
    torch.testing.assert_close(prediction.covariance.diagonal(dim1=1, dim2=2), prediction.variance)
    assert prediction.covariance[:, 0, 1].abs().min() > 0
    torch.testing.assert_close(prediction[1:3].covariance, prediction.covariance[1:3])


def test_the_covariance_has_the_rows_first_whatever_the_layout_of_the_output(net):
    x = torch.randn(7, 5, 2)  # [position, row, input]
    by_row = db.predict(net, x.movedim(1, 0), n_draws=20, likelihood=db.Gaussian(4.0), keep_draws=True)
    sampling = db.Sampling(row_axis=1)
    prediction = db.predict(net, x, n_draws=20, likelihood=db.Gaussian(4.0), keep_draws=True, sampling=sampling)
    torch.testing.assert_close(prediction.covariance, by_row.covariance)
    one = nn.Sequential(net, nn.Flatten(0))  # [row]
    numbers = db.predict(one, x[0, :, :1].repeat(1, 2), likelihood=db.Gaussian(4.0), keep_draws=True)
    torch.testing.assert_close(numbers.covariance.flatten(), numbers.variance)


def test_a_covariance_has_the_unit_of_the_outcomes(net):
    class Prices(nn.Module):
        def forward(self, x):
            return 1e7 * (net(nn.functional.dropout(x, 0.3)) - net(x))

    x = torch.randn(1000, 2)
    prediction = db.predict(Prices(), x, n_draws=301, likelihood=db.Gaussian(1e-12), keep_draws=True)
    torch.testing.assert_close(prediction.covariance.diagonal(dim1=1, dim2=2), prediction.variance)


def test_a_covariance_needs_draws_that_average_to_the_mean(net):
    x = torch.randn(5, 2)
    with pytest.raises(ValueError, match=r"`covariance` needs the draws.*keep_draws=True"):
        _ = db.predict(net, x, n_draws=50).covariance
    with pytest.raises(ValueError, match="whose mean is the network's output"):
        _ = db.predict(net, x, n_draws=50, likelihood=db.Categorical(), keep_draws=True).covariance


# Several outputs ------------------------------------------------------------------------------------------------------


class TwoHeads(nn.Module):
    def __init__(self, as_dict=True):
        super().__init__()
        self.body, self.a, self.b = (
            nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.4)),
            nn.Linear(16, 1),
            nn.Linear(16, 4),
        )
        self.as_dict = as_dict

    def forward(self, x):
        h = self.body(x)
        return {"number": self.a(h), "kind": self.b(h)} if self.as_dict else (self.a(h), self.b(h))


class Only(nn.Module):
    def __init__(self, net, name):
        super().__init__()
        self.net, self.name = net, name

    def forward(self, x):
        return self.net(x)[self.name]


@pytest.mark.parametrize("as_dict", [True, False])
def test_each_output_is_read_by_its_own_likelihood(as_dict):
    torch.manual_seed(0)
    net, x = TwoHeads(as_dict), torch.randn(6, 3)
    number, kind = ("number", "kind") if as_dict else (0, 1)
    likelihoods = {"number": db.Gaussian(4.0), "kind": db.Categorical()}
    both = db.predict(net, x, likelihood=likelihoods if as_dict else tuple(likelihoods.values()), n_draws=20)
    for name, likelihood in zip((number, kind), likelihoods.values(), strict=True):
        alone = db.predict(
            Only(net, name), x, likelihood=likelihood, n_draws=20, sampling=db.Sampling(integrate_last_layer=False)
        )
        torch.testing.assert_close(both.head(name).mean, alone.mean)
        torch.testing.assert_close(both.head(name).variance, alone.variance)
    torch.testing.assert_close(both.head(kind).entropy, alone.entropy)
    assert both.entropy[number] is None and torch.equal(
        both.mutual_information[kind], both.head(kind).mutual_information
    )
    assert list(both.head(number).to_pandas())[:2] == ["mean", "std"]
    with pytest.raises(AttributeError, match="needs a likelihood of classes"):
        _ = both.head(number).entropy
    with pytest.raises(KeyError, match="`name` must be that of an output"):
        both.head("another")


def test_likelihoods_of_another_structure_than_the_output_are_refused():
    net, x = TwoHeads(), torch.randn(6, 3)
    for wrong in ({"number": db.Gaussian(1.0)}, (db.Gaussian(1.0), db.Categorical()), [db.Gaussian(1.0)]):
        with pytest.raises(ValueError, match=r"`likelihood` must have an entry for each output.*\['number', 'kind'\]"):
            db.predict(net, x, likelihood=wrong)
    with pytest.raises(ValueError, match="must have an entry for each output of the network, one tensor"):
        db.predict(net.body, x, likelihood=[db.Gaussian(1.0)])
    with pytest.raises(TypeError, match="`likelihood` must be one of"):
        db.predict(net, x, likelihood={"number": db.Gaussian(1.0), "kind": "classes"})
    raw = db.predict(net, x, likelihood={"number": None, "kind": db.Categorical()}, n_draws="auto")
    assert (raw.head("number").aleatoric == 0).all() and raw.head("kind").draws_used.shape == (6,)


# Pictures -------------------------------------------------------------------------------------------------------------


def test_a_number_is_drawn_as_a_band_and_classes_as_bars():
    pytest.importorskip("matplotlib").use("Agg")
    prediction = predicted(likelihood=db.Gaussian(4.0))
    ax = prediction.plot(torch.linspace(0, 1, 12), y=torch.zeros(12))
    band = ax.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(float((prediction.mean + 2 * prediction.std).max()))
    bars = predicted(n_outputs=3, likelihood=db.Categorical())
    ax = bars.plot()
    last = bars.mean[bars.entropy.argmax()]
    assert [round(c.patches[-1].get_height(), 5) for c in ax.containers] == pytest.approx(last.tolist(), abs=1e-5)


def test_without_matplotlib_a_picture_names_what_is_missing(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match="needs matplotlib"):
        predicted().plot()


def test_a_prediction_moves_to_a_device_with_all_that_it_holds():
    prediction = predicted(likelihood=db.Categorical(), n_outputs=3, keep_draws=True, quantiles=(0.5,))
    moved = prediction.to("meta")
    assert {value.device.type for value in moved._statistics().values()} == {"meta"}
    assert moved.mean.shape == prediction.mean.shape and moved.method == prediction.method


def test_a_loop_over_a_prediction_ends_with_its_last_row():
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))
    prediction = db.predict(net, torch.randn(3, 2), n_draws=4)
    assert torch.equal(torch.cat([row.mean for row in prediction]), prediction.mean)
    assert torch.equal(prediction[-3].mean, prediction[0].mean)
    for index in (3, -4, "mean"):
        with pytest.raises(IndexError, match=f"one of the 3 rows, 0 to 2; got {index!r}"):
            prediction[index]


def test_a_table_of_as_many_rows_as_positions_has_every_statistic_by_row():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1), nn.Flatten(-2))
    x = torch.randn(4, 4, 3)  # [position, row, input]
    prediction = db.predict(net, x, likelihood=db.Bernoulli(), sampling=db.Sampling(row_axis=1))
    table, p = prediction.to_pandas(), prediction.mean.T
    entropy = torch.special.entr(p) + torch.special.entr(1 - p)
    for name, expected in (("probability", p), ("entropy", entropy)):
        got = torch.tensor(table[[f"{name}_{k}" for k in range(4)]].to_numpy())
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_only_output_of_a_structure_is_a_head_with_its_classes(net):
    class Named(nn.Module):
        def forward(self, x):
            return {"logits": net(x)}

    x = torch.randn(5, 2)
    named, plain = (db.predict(one, x, likelihood=db.Categorical(), keep_draws=True) for one in (Named(), net))
    head = named.head("logits")
    torch.testing.assert_close((head.mean, head.entropy), (plain.mean, plain.entropy))
    assert list(head.to_pandas()) == list(plain.to_pandas())
    for wrong in (0, "mean"):  # never a row
        with pytest.raises(KeyError, match="must be that of an output of the network"):
            plain.head(wrong)


def test_rows_are_chosen_by_numpy_arrays_too(net):
    prediction = db.predict(net, torch.randn(5, 2), keep_draws=True)
    kept = np.array([True, False, True, False, False])
    for index in (kept, np.array([0, 2]), [0, 2]):
        assert torch.equal(prediction[index].draws, prediction.draws[:, [0, 2]])
    assert torch.equal(prediction[np.int64(3)].mean, prediction.mean[3:4])


@pytest.mark.parametrize("last", [nn.Identity(), nn.Flatten(0)])  # [row, 1] and [row]
def test_yes_or_no_is_drawn_as_two_classes(net, last):
    pytest.importorskip("matplotlib")
    one = nn.Sequential(nn.Linear(2, 9), nn.Dropout(0.3), nn.Linear(9, 1), last)
    prediction = db.predict(one, torch.randn(5, 2), likelihood=db.Bernoulli())
    bars: list[Any] = prediction.plot().patches
    heights = sorted(bar.get_height() for bar in bars)
    p = prediction.mean.flatten()
    assert heights == pytest.approx(torch.cat([p, 1 - p]).sort().values.tolist())
