"""Rows of every form: arrays, nested inputs, DataLoaders."""

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import dropbayes as db
from dropbayes.training import EarlyStopping, Optimization, fit
from tests.training.toys import network, toy


def test_classification_and_dict_inputs_train():
    x, y = toy(200)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.1), nn.Linear(2, 2)

        def forward(self, features: torch.Tensor) -> torch.Tensor:
            return self.layer(self.drop(features))

    net, label = Named(), (y[:, 0] > 0).long()
    fit(
        net,
        {"features": x},
        label,
        likelihood=db.Categorical(),
        epochs=60,
        device="cpu",
        optimization=Optimization(learning_rate=0.05),
    )
    assert (net.eval()(x).argmax(1) == label).float().mean() > 0.9


def test_numpy_arrays_and_a_data_loader_without_shuffling_train_like_tensors():
    x, y = toy()
    nets = [network() for _ in range(3)]
    options = {"likelihood": db.Gaussian(4.0), "epochs": 3, "device": "cpu", "batch_size": 64}
    fit(nets[0], x, y, **options)
    fit(nets[1], x.double().numpy(), y.double().numpy(), **options)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=64)
    history = fit(nets[2], loader, **options)
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    # One batch of all rows in another order, and masks that follow the order: close, not equal.
    torch.testing.assert_close(nets[0][0].weight, nets[2][0].weight, atol=0.01, rtol=0)
    assert len(history.loss) == 3


@pytest.mark.parametrize("key", ["labels", "label"])
def test_a_loader_of_dicts_with_labels_trains_like_one_of_pairs(key):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.drop, self.layer = nn.Dropout(0.1), nn.Linear(2, 1)

        def forward(self, features, labels=None, **others):
            assert labels is None and not others
            return {"logits": self.layer(self.drop(features))}

    (x, y), nets = toy(), [Model(), Model()]
    data = [torch.utils.data.TensorDataset(x, y), [{"features": a, key: b} for a, b in zip(x, y, strict=True)]]
    loaders = [DataLoader(some, batch_size=16) for some in data]
    wrapped = [db.training.EarlyStopping(loader) for loader in loaders]
    runs = [
        fit(net, loader, likelihood=db.Gaussian(4.0), epochs=3, device="cpu", stopping=stopping)
        for net, loader, stopping in zip(nets, loaders, wrapped, strict=True)
    ]
    assert runs[0] == runs[1] and torch.equal(nets[0].layer.weight, nets[1].layer.weight)
    scores = [db.evaluate(net, one, likelihood=db.Gaussian(4.0)).scores for net, one in zip(nets, loaders, strict=True)]
    assert scores[0] == scores[1]


def loader_of(x, y, generator=None):
    data = torch.utils.data.TensorDataset(x, y)
    return torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, generator=generator)


def test_a_shuffling_loader_repeats_with_the_seed_and_its_own_generator_is_left_as_it_was():
    x, y = toy()
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    nets = [network() for _ in range(4)]
    for net, seed, own in zip(nets, (0, 0, 1, 0), (None, None, None, generator), strict=True):
        fit(net, loader_of(x, y, own), likelihood=db.Gaussian(4.0), epochs=2, seed=seed, device="cpu")
    assert torch.equal(nets[0][0].weight, nets[1][0].weight)
    assert not torch.equal(nets[0][0].weight, nets[2][0].weight)
    assert torch.equal(generator.get_state(), state)


def test_a_sampler_of_some_rows_trains_as_those_rows_alone(tmp_path):
    x, y = toy()
    data, chosen = torch.utils.data.TensorDataset(x, y), list(range(0, len(x), 4))
    options = {"likelihood": db.Gaussian(4.0), "device": "cpu", "epochs": 1, "prior": db.Prior(length_scale=9.0)}
    sampler, batch = torch.utils.data.SubsetRandomSampler(chosen), {"batch_size": len(x)}
    some = torch.utils.data.DataLoader(data, sampler=sampler, **batch)
    alone = fit(network(0.0), x[chosen], y[chosen], **options, **batch)
    batches = torch.utils.data.BatchSampler(sampler, len(x), drop_last=False)
    for loader in (some, torch.utils.data.DataLoader(data, batch_sampler=batches)):
        assert fit(network(0.0), loader, **options).loss == pytest.approx(alone.loss, rel=1e-5)
    fit(network(), some, checkpoint=tmp_path / "c", **options)
    other = torch.utils.data.DataLoader(
        data, sampler=torch.utils.data.SubsetRandomSampler([i + 1 for i in chosen]), **batch
    )
    with pytest.raises(ValueError, match="belongs to another run"):
        fit(network(), other, checkpoint=tmp_path / "c", **options)


def test_a_loaders_run_resumes_bit_for_bit(tmp_path):
    x, y = toy()
    whole, broken = network(), network()
    options = {"likelihood": db.Gaussian(4.0), "device": "cpu"}
    options["stopping"] = EarlyStopping(loader_of(*toy(32)), n_draws=4)
    expected = fit(whole, loader_of(x, y), epochs=6, **options)
    fit(broken, loader_of(x, y), epochs=2, checkpoint=tmp_path / "c", **options)
    resumed = network()
    assert fit(resumed, loader_of(x, y), epochs=6, checkpoint=tmp_path / "c", **options) == expected
    assert torch.equal(resumed[0].weight, whole[0].weight)


def test_nested_inputs_with_parts_that_are_no_rows_train():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 1))

        def forward(self, features, scale, flag=False):
            return self.layer(features["a"]) * scale if flag else features["a"][:, :1]

    x, y = toy()
    net = Scaled()
    before = net.layer[1].weight.clone()
    fit(
        net,
        {"features": {"a": x}, "scale": torch.ones(1), "flag": True},
        y,
        likelihood=db.Gaussian(4.0),
        epochs=2,
        device="cpu",
        stopping=EarlyStopping(({"features": {"a": x}, "scale": torch.ones(1), "flag": True}, y)),
    )
    assert not torch.equal(net.layer[1].weight, before)


@pytest.mark.parametrize(
    ("x", "y", "error", "message"),
    [
        (torch.ones(4, 2), None, TypeError, "`y` must hold the targets"),
        (torch.ones(4, 2), torch.ones(3, 1), ValueError, "`y` must have one entry per row of `x`"),
        (torch.ones(4, 2), torch.full((4, 1), float("nan")), ValueError, "`y` must be finite"),
        (torch.ones(4, 2), torch.ones(4), ValueError, "`y` must have the shape"),
        (torch.ones(0, 2), torch.ones(0, 1), ValueError, "at least one row"),
        (torch.utils.data.DataLoader([1.0, 2.0]), None, TypeError, "DataLoader of pairs"),
        (torch.utils.data.DataLoader([(1.0, 2.0)]), torch.ones(1), TypeError, "leave `y`"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_the_network_is_unchanged(x, y, error, message):
    net = network().eval()
    with pytest.raises(error, match=message):
        fit(net, x, y, likelihood=db.Gaussian(4.0), device="cpu")
    assert not net.training and torch.equal(net[0].weight, network()[0].weight)


def test_labels_that_name_no_class_are_refused_before_training():
    x, _ = toy()
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3))
    for labels in (torch.full((64,), 3), torch.full((64,), -1)):
        with pytest.raises(ValueError, match="`y` must hold class labels from 0 to 2"):
            fit(net, x, labels, likelihood=db.Categorical(), device="cpu")


def test_an_output_without_a_tensor_is_explained():
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x):
            return self.layer(x), x

    with pytest.raises(TypeError, match=r"`net` must return a tensor or an output with `logits`; got tuple"):
        fit(Pair(), *toy(), likelihood=db.Gaussian(4.0), device="cpu")


def test_a_loader_that_gathers_no_batches_is_refused_since_its_items_do_not_say_their_number():
    data = TensorDataset(*toy())
    with pytest.raises(ValueError, match=r"`x` must gather rows into batches, .*; got batch_size=None"):
        fit(network(), DataLoader(data, batch_size=None), likelihood=db.Gaussian(4.0), epochs=1, device="cpu")
    batches = BatchSampler(SequentialSampler(data), batch_size=8, drop_last=False)
    loader = DataLoader(data, sampler=batches, batch_size=None)
    found = fit(network(), loader, likelihood=db.Gaussian(4.0), epochs=1, device="cpu")
    usual = fit(network(), DataLoader(data, batch_size=8), likelihood=db.Gaussian(4.0), epochs=1, device="cpu")
    assert found.loss == usual.loss
