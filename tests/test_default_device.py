"""The caller's default device is for the caller's own tensors: no result of the library depends on it."""

import numpy as np
import pytest
import torch
from torch import nn

import dropbayes as db

NOISE = db.Gaussian(precision=4.0)
OTHER = "cuda" if torch.cuda.is_available() else "meta"  # CUDA takes generators of its own alone


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Dropout(0.3), nn.Linear(16, 2)).eval()


def fitted(net, x, y):
    db.fit(net, x, y, likelihood=NOISE, prior=db.Prior(length_scale=1.0), epochs=2, batch_size=8)
    return net(x)


class Seeded(nn.Sequential):
    """Its code names a setter of torch's generator: the inspection looks whether masks repeat."""

    def forward(self, x):
        state = torch.get_rng_state()
        out = super().forward(x)
        if self.training and out is None:
            torch.set_rng_state(state)
        return out


DOORS = {
    "predict": lambda net, x, y: db.predict(net, x, n_draws=8, masks="row").std,
    "predict until the error is small": lambda net, x, y: db.predict(net, x, n_draws="auto").mean,
    "predict independently": lambda net, x, y: db.predict(net, x, sampling=db.Sampling(sampler="independent")).std,
    "linear": lambda net, x, y: db.predict(net, x, method="linear").std,
    "moments": lambda net, x, y: db.predict(nn.Sequential(*net[:2], *net[3:]), x, method="moments").std,
    "draws": lambda net, x, y: db.draws(net, x, n_draws=8),
    "function_draw": lambda net, x, y: db.function_draw(net, 3, n_draws=8)(x),
    "doctor": lambda net, x, y: torch.tensor([len(str(db.doctor(net, x)))], device="cpu"),
    "evaluate": lambda net, x, y: torch.tensor(
        db.evaluate(net, x, y, likelihood=NOISE, n_draws=8).log_likelihood, device="cpu"
    ),
    "check": lambda net, x, y: torch.tensor([len(str(db.check(net, x, y, likelihood=NOISE)))], device="cpu"),
    "explain": lambda net, x, y: db.explain(net, x).by_feature,
    "tune_dropout": lambda net, x, y: db.predict(db.tune_dropout(net, x, y, likelihood=NOISE).network, x).mean,
    "fit": fitted,
    "a network that sets torch's state": lambda net, x, y: db.predict(Seeded(*net), x, n_draws=8).std,
}


@pytest.mark.parametrize("door", DOORS)
def test_results_do_not_depend_on_the_default_device(door):
    torch.manual_seed(1)
    x, y = torch.randn(24, 4), torch.randn(24, 2)
    results = []
    for device in ("cpu", OTHER):
        net = network()
        torch.manual_seed(2)
        with torch.device(device):
            results.append(DOORS[door](net, x, y))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


@pytest.mark.parametrize("kind", [db.DropoutRegressor, db.DropoutClassifier])
def test_an_estimator_does_not_depend_on_the_default_device(kind, tmp_path):
    x = np.random.default_rng(0).normal(size=(60, 2))
    y = x[:, 0] if kind is db.DropoutRegressor else (x[:, 0] > 0).astype(int)
    results = []
    for device in ("cpu", OTHER):
        with torch.device(device):
            estimator = kind(effort="quick", n_steps=20, random_state=0).fit(x, y)
            estimator.save(tmp_path / "model")
            estimator = kind.load(tmp_path / "model")
            results.append(estimator.predict(x))
            if kind is db.DropoutRegressor:
                results[-1] = np.column_stack([results[-1], *estimator.predict_interval(x), estimator.sample_y(x)])
            else:
                results[-1] = np.column_stack([estimator.predict_proba(x), *estimator.predict_uncertainty(x)])
    np.testing.assert_array_equal(results[0], results[1])
