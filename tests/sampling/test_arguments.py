"""Arguments of every kind: batches with targets, probabilities of any type, noise of any type, and what is returned."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dropbayes as db
from tests.cases import crossed
from tests.sampling.loop import assert_law, made, may_be_refused, network
from tests.sampling.training_loop import rows


def perceptron(p=0.3, outputs=2):
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(p), nn.Linear(16, outputs))


# A dict that the network takes itself ---------------------------------------------------------------------------------


def by_batch():
    net = network(lambda self, batch: self.n(batch["x"]) + batch["shift"], n=perceptron(outputs=1))
    return net, {"x": rows(8), "shift": torch.arange(8.0)[:, None]}


def test_a_dict_none_of_whose_names_the_network_takes_is_its_argument():
    net, batch = made(by_batch)
    expected = db.draws(net, (batch,), n_draws=5)
    assert torch.equal(db.draws(net, batch, n_draws=5), expected)
    torch.testing.assert_close(db.function_draw(net, 2, n_draws=5)(batch), expected[2])
    assert len(db.sites(net, batch)) == len(db.explain(net, batch).sites) == 1
    y = torch.zeros(8, 1)
    judged = db.evaluate(net, (batch,), y, likelihood=db.Gaussian(1.0))
    assert db.evaluate(net, batch, y, likelihood=db.Gaussian(1.0)).log_likelihood == judged.log_likelihood
    loader = DataLoader([{name: value[i] for name, value in batch.items()} for i in range(8)], batch_size=3)
    for x in (batch, loader):
        torch.testing.assert_close(db.predict(net, x, progress=False).mean, db.predict(net, (batch,)).mean)


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_for_a_network_of_one_argument_is_its_argument(kind):
    def forward(self, inputs):
        a, b = inputs
        return self.o(self.d(torch.relu(self.a(a) * self.b(b))))

    children = {"a": nn.Linear(6, 16), "b": nn.Linear(6, 16), "d": nn.Dropout(0.3), "o": nn.Linear(16, 2)}
    net, (a, b) = made(lambda: (network(forward, **children), (rows(3), rows(3))))
    x = kind((a, b))
    expected = db.draws(net, (x,), n_draws=5)
    assert torch.equal(db.draws(net, x, n_draws=5), expected)
    torch.testing.assert_close(db.function_draw(net, 3, n_draws=5)(x), expected[3])
    loader = DataLoader([((one, two), 0) for one, two in zip(a, b, strict=True)], batch_size=2)
    torch.testing.assert_close(db.predict(net, loader, progress=False).mean, db.predict(net, (x,)).mean)


@pytest.mark.parametrize(("n", "m"), [(10, 5), (5, 10), (3, 2), (2, 3)])
def test_arguments_of_different_lengths_are_refused_as_the_network_does(n, m):
    net = network(lambda self, a, b: self.n(a) + b, n=perceptron(outputs=1)).eval()
    with pytest.raises(RuntimeError, match="must match the size"):
        db.predict(net, (rows(n), torch.zeros(m, 1)))


# Batches with targets -------------------------------------------------------------------------------------------------

OPTIONAL = {
    "temperature": lambda self, x, temperature=1.0: self.n(x) / temperature,
    "hidden": lambda self, x, hidden=None: self.n(x) + (0 if hidden is None else hidden),
    "mask": lambda self, x, mask=None: self.n(x if mask is None else x * mask),
    "return_features": lambda self, x, return_features=False: x if return_features is not False else self.n(x),
    "keyword only": lambda self, x, *, scale=1.0: self.n(x) * scale,
    "two of them": lambda self, x, scale=1.0, shift=0.0: self.n(x) * scale + shift,
}


@pytest.mark.parametrize(("name", "batch_size"), crossed(OPTIONAL, [4, 1]))
def test_targets_are_no_optional_argument(name, batch_size):
    net, x = made(lambda: (network(OPTIONAL[name], n=perceptron(outputs=1)), rows(8)))
    y = torch.randint(1, 4, (8, 1), generator=torch.Generator().manual_seed(0)).float()
    loader = DataLoader(TensorDataset(x, y), batch_size=batch_size)
    expected = db.predict(net, x)
    torch.testing.assert_close(db.predict(net, loader, progress=False).mean, expected.mean)
    judged = db.evaluate(net, loader, likelihood=db.Gaussian(1.0), progress=False)
    torch.testing.assert_close(
        judged.log_likelihood, db.evaluate(net, x, y, likelihood=db.Gaussian(1.0)).log_likelihood
    )


def test_a_second_argument_without_default_is_passed():
    net, x = made(lambda: (network(lambda self, x, k: self.n(x) * k, n=perceptron()), rows(8)))
    k, y = rows(8)[:, :1], torch.zeros(8, 2)
    loader = DataLoader(TensorDataset(x, k, y), batch_size=4)
    torch.testing.assert_close(db.predict(net, loader, progress=False).mean, db.predict(net, (x, k)).mean)


# Drop probabilities of any type ---------------------------------------------------------------------------------------

PROBABILITIES = {
    "np.float32": np.float32(0.3),
    "np.float64": np.float64(0.3),
    "np.float16": np.float16(0.5),
    "a tensor": torch.tensor(0.3),
    "one": 1,
    "zero": 0,
    "True": True,
    "np.int64(1)": np.int64(1),
}


def wide(p, other):
    layers = nn.Linear(8, 256), nn.ReLU(), nn.Dropout(p), nn.Linear(256, 256), nn.ReLU(), nn.Dropout(other)
    return nn.Sequential(*layers, nn.Linear(256, 2)), torch.randn(4, 8)


def convolved(p, other):
    layers = nn.Conv1d(2, 6, 3), nn.ReLU(), nn.Dropout1d(p), nn.Conv1d(6, 4, 1), nn.Dropout(other), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 2)), torch.randn(4, 2, 4)


@pytest.mark.parametrize(("name", "make"), crossed(PROBABILITIES, [wide, convolved]))
@pytest.mark.parametrize("invariant", [True, False])
def test_a_drop_probability_is_a_number_of_any_type(name, make, invariant):
    p = PROBABILITIES[name]
    net, x = made(lambda: make(p, 0.5))
    plain, _ = made(lambda: make(float(p), 0.5))
    ours, theirs = (
        db.draws(one, x, n_draws=20, sampling=db.Sampling(batch_invariant=invariant)) for one in (net, plain)
    )
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours, db.draws(net, x, n_draws=20))
    assert ours.var(0).sum() > 0


# Complex noise --------------------------------------------------------------------------------------------------------

COMPLEX = {
    "randn": lambda x: torch.randn(x.shape, dtype=torch.cfloat),
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "of two parts": lambda x: torch.complex(torch.randn(x.shape), torch.randn(x.shape)),
    "rand": lambda x: torch.rand(x.shape, dtype=torch.cfloat),
    "one for all rows": lambda x: torch.randn(x.shape[1], dtype=torch.cfloat),
}


@pytest.mark.parametrize(("name", "gated"), crossed(COMPLEX, [True, False]))
def test_complex_noise_has_two_parts(name, gated):
    def forward(self, x):
        z = torch.complex(x, self.d(x) if gated else -x)
        # No layer after it, which would mix the parts: each has a variance of its own.
        return torch.view_as_real(z + COMPLEX[name](z) if self.training or not gated else z).flatten(1)

    assert_law(*made(lambda: (network(forward, d=nn.Dropout(0.3)), torch.randn(2, 6))))


# Leaving modules out --------------------------------------------------------------------------------------------------

AUGMENTATIONS = {
    "uniform": lambda self, x: x * (0.8 + 0.4 * torch.rand(len(x), 1)),
    "uniform_": lambda self, x: x * torch.empty(len(x), 1).uniform_(0.8, 1.2),
    "normal": lambda self, x: x + 0.1 * torch.randn_like(x),
    "gate": lambda self, x: x * (torch.rand(len(x), 1) < 0.9),
    "scalar gate": lambda self, x: -x if torch.rand([]) < 0.3 else x,
}


@pytest.mark.parametrize("name", AUGMENTATIONS)
@pytest.mark.parametrize("gated", [False, True], ids=["always on", "in training"])
def test_an_augmentation_left_out_is_at_rest_or_refused(name, gated):
    change = AUGMENTATIONS[name]
    middle = network(lambda self, x: change(self, x) if self.training or not gated else x)
    forward = lambda self, x: self.o(self.d(self.a(self.j(x))))  # noqa: E731
    net, x = made(
        lambda: (network(forward, j=middle, a=nn.Linear(6, 16), d=nn.Dropout(0.3), o=nn.Linear(16, 2)), rows(2))
    )
    with may_be_refused() as refused:
        ours = db.predict(net, x, sampling=db.Sampling(ignore_modules="j"))
        # A gate without noise is open, and jitter has its mean: both are the input itself.
        torch.testing.assert_close(ours.mean, net.o(net.a(x)), atol=1e-4, rtol=1e-4)
    assert not (gated and refused)


def test_an_auxiliary_head_left_out_leaves_the_dropout():
    def forward(self, x):
        h = F.dropout(torch.relu(self.a(x)), 0.3, training=self.training)
        return (self.o(h), self.aux(h)) if self.training else self.o(h)

    net, x = made(lambda: (network(forward, a=nn.Linear(6, 16), o=nn.Linear(16, 2), aux=nn.Linear(16, 2)), rows(3)))
    with may_be_refused():
        assert (db.predict(net, x, sampling=db.Sampling(ignore_modules="aux")).epistemic > 0).all()


# Likelihoods ----------------------------------------------------------------------------------------------------------


def test_check_judges_probabilities_as_evaluate_does():
    net, x = made(lambda: (nn.Sequential(perceptron(outputs=3), nn.Softmax(-1)), rows(40)))
    y, likelihood = torch.randint(0, 3, (40,)), db.Categorical(probabilities=True)
    ours = db.check(net, x, y, likelihood=likelihood).log_likelihood
    assert ours == pytest.approx(float(db.evaluate(net, x, y, likelihood=likelihood).log_likelihood), abs=1e-6)


@pytest.mark.parametrize("probabilities", [False, True])
def test_check_judges_classes_along_another_axis_as_evaluate_does(probabilities):
    end = nn.Softmax(1) if probabilities else nn.Identity()
    body = nn.Conv1d(2, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.3), nn.Conv1d(8, 3, 1), end
    net, x = made(lambda: (nn.Sequential(*body), torch.randn(20, 2, 5)))
    y, likelihood = torch.randint(0, 3, (20, 5)), db.Categorical(class_axis=-2, probabilities=probabilities)
    ours = db.check(net, x, y, likelihood=likelihood).log_likelihood
    assert ours == pytest.approx(float(db.evaluate(net, x, y, likelihood=likelihood).log_likelihood), abs=1e-5)


def test_tune_dropout_judges_probabilities_as_evaluate_does():
    plain = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3), nn.Softmax(-1))
    net, x = made(lambda: (plain, rows(40)))
    y, likelihood = torch.randint(0, 3, (40,)), db.Categorical(probabilities=True)
    expected = net(x).gather(1, y[:, None]).log().mean().item()
    tuning = db.tune_dropout(net, x, y, likelihood=likelihood, per="network", drop_probs=(0.05,), n_draws=10)
    assert tuning.plain_log_likelihood == pytest.approx(expected, abs=1e-5)


# What is returned -----------------------------------------------------------------------------------------------------

LIKELIHOODS = {"classes": (db.Categorical(), 3), "counts": (db.Poisson(), 2), "yes or no": (db.Bernoulli(), 2)}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_quantiles_are_of_what_the_mean_is_of(name):
    likelihood, outputs = LIKELIHOODS[name]
    net, x = made(lambda: (perceptron(0.2, outputs), rows(5)))
    ours = db.predict(net, x, likelihood=likelihood, quantiles=[0.01, 0.99], n_draws=200)
    assert (ours.quantiles[0] <= ours.mean).all() and (ours.mean <= ours.quantiles[1]).all()
    assert (ours.quantiles >= 0).all()


def test_rows_along_the_second_axis_are_rows_of_the_prediction():
    net, x = made(lambda: (perceptron(), torch.randn(3, 5, 6)))
    ours = db.predict(net, x, sampling=db.Sampling(row_axis=1), quantiles=[0.1, 0.9], keep_draws=True)
    assert len(ours) == 5
    assert torch.equal(ours[0].mean, ours.mean[:, :1]) and torch.equal(ours[-1].std, ours.std[:, -1:])
    assert torch.equal(ours[1:3].mean, ours.mean[:, 1:3])
    assert ours[2].draws.shape == (100, 3, 1, 2) and ours[2].quantiles.shape == (2, 3, 1, 2)


@pytest.mark.parametrize("index", [np.int64(1), np.int32(-1), torch.tensor(1), 1, -1], ids=repr)
def test_one_row_of_a_prediction_keeps_its_axis(index):
    net, x = made(lambda: (perceptron(), rows(4)))
    ours = db.predict(net, x)
    expected = ours.mean[int(index)][None]
    assert torch.equal(ours[index].mean, expected) and len(ours[index]) == 1


WRONG = {"None": None, "text": ["a", "b"], "a number": 3.0, "a path": "rows.csv", "a generator": (i for i in [rows(2)])}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("ask", [db.predict, db.draws, db.sites])
def test_what_is_no_input_is_refused_by_name(name, ask):
    net, _ = made(lambda: (perceptron(), None))
    with may_be_refused() as refused:
        ask(net, WRONG[name])
    assert refused and str(refused[0]).startswith("`x`")


def test_a_row_without_its_row_axis_is_refused_with_the_remedy():
    net, x = made(lambda: (perceptron(), rows(7)))
    samples = DataLoader(TensorDataset(x, torch.zeros(7, 2)), batch_size=None)
    asked = [
        lambda: db.predict(net, x[0]),
        lambda: db.predict(net, x[0], method="linear"),
        lambda: db.draws(net, x[0]),
        lambda: db.function_draw(net)(x[0]),
        lambda: db.predict(net, samples, progress=False),
        lambda: db.evaluate(net, samples, likelihood=db.Gaussian(1.0), progress=False),
    ]
    for ask in asked:
        with pytest.raises(ValueError, match=r"a vector are rows\. One row is x\[None\], a DataLoader needs batches"):
            ask()


@pytest.mark.parametrize("options", [{"n_draws": 0}, {"masks": "none"}, {"seed": "a"}])
def test_a_wrong_option_is_refused_by_name(options):
    net, x = made(lambda: (perceptron(), rows(2)))
    with may_be_refused() as refused:
        db.predict(net, x, **options)
    assert refused and str(refused[0]).startswith(f"`{next(iter(options))}`")


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": "x"},
        {"row_offset": -1},
        {"ignore_modules": "x"},
        {"positions": "x"},
        {"tolerance": 0},
        {"max_bytes": 0},
    ],
)
def test_a_wrong_setting_is_refused_by_name(options):
    net, x = made(lambda: (perceptron(), rows(2)))
    with may_be_refused() as refused:
        db.predict(net, x, sampling=db.Sampling(**options))
    assert refused and str(refused[0]).startswith(f"`{next(iter(options))}`")
