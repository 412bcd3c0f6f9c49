"""Tests of classes, labels and counts against torch.distributions."""

import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.likelihoods import Bernoulli, Categorical, Poisson

DTYPE = torch.float64


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("shape", "class_axis"), [((5, 4), -1), ((6, 5, 4), -1), ((5, 4, 3, 2), -3), ((6, 5, 4, 3, 2), -3), ((5, 3, 4), -1)]
)
def test_categorical_log_density_is_that_of_torch_distributions(shape, class_axis):
    output = torch.randn(shape, dtype=DTYPE)
    draws = 1 if shape[0] == 6 else 0
    event = [size for axis, size in enumerate(shape[draws:]) if axis != len(shape) - draws + class_axis]
    y = torch.randint(4, event)
    expected = torch.distributions.Categorical(logits=output.movedim(class_axis, -1)).log_prob(y)
    expected = expected.flatten(draws + 1).sum(-1) if len(event) > 1 else expected
    torch.testing.assert_close(Categorical(class_axis).log_density(output, y), expected)


@pytest.mark.parametrize("class_axis", [None, 1, -3])
def test_the_classes_of_a_map_are_on_axis_one(class_axis):
    net = nn.Sequential(nn.Conv2d(1, 4, 1), nn.ReLU(), nn.Dropout2d(0.5), nn.Conv2d(4, 3, 1))
    x, y = torch.randn(2, 1, 5, 6), torch.randint(3, (2, 5, 6))
    likelihood = Categorical(class_axis)
    prediction = db.predict(net, x, likelihood=likelihood, n_draws=4)
    torch.testing.assert_close(prediction.mean.sum(1), torch.ones(2, 5, 6))
    assert prediction.mutual_information.shape == (2, 5, 6)
    density = torch.nn.functional.cross_entropy(net.eval()(x), y, reduction="none").flatten(1).sum(-1)
    torch.testing.assert_close(likelihood.log_density(net(x), y), -density)
    assert db.evaluate(net, x, y, likelihood=likelihood, n_draws=4).n_rows == 2


def test_the_classes_of_an_output_of_three_axes_are_asked_for():
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    tokens = torch.randn(2, 5, 4)
    with pytest.raises(ValueError, match="`class_axis` must be given for an output of three axes"):
        db.predict(net, tokens, likelihood=Categorical())
    last = db.predict(net, tokens, likelihood=Categorical(class_axis=-1), n_draws=4)
    torch.testing.assert_close(last.mean.sum(-1), torch.ones(2, 5))
    same = db.predict(net, tokens, likelihood=Categorical(class_axis=2), n_draws=4)
    assert torch.equal(same.mean, last.mean)


@pytest.mark.parametrize("class_axis", [0, 2, -2, -3, "last"])
def test_a_class_axis_outside_the_output_is_refused(class_axis):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    with pytest.raises(ValueError, match="`class_axis` must be an axis after the rows"):
        db.predict(net, torch.randn(2, 4), likelihood=Categorical(class_axis))


def test_categorical_moments_are_those_of_one_hot_labels():
    output = torch.randn(4, 3, dtype=DTYPE)
    oracle = torch.distributions.OneHotCategorical(logits=output)
    torch.testing.assert_close(Categorical().mean(output), oracle.mean)
    torch.testing.assert_close(Categorical().variance(output), oracle.variance)


@pytest.mark.parametrize(
    ("y", "rule"),
    [
        (torch.zeros(4), r"class labels .* y.long\(\), or y.argmax\(-1\)"),
        (torch.zeros(4, 3, dtype=torch.long), r"less its class axis.* One-hot rows are y.argmax\(-1\)"),
        (torch.zeros(4, 1, dtype=torch.long), r"a column y\[:, 0\]"),
        (torch.zeros(5, dtype=torch.long), "less its class axis"),
        (torch.tensor(0), "less its class axis"),
    ],
)
def test_labels_that_do_not_fit_are_refused(y, rule):
    with pytest.raises(ValueError, match=rule):
        Categorical().log_density(torch.zeros(4, 3), y)


def test_categorical_log_density_differentiates():
    output = torch.randn(3, 4, dtype=DTYPE, requires_grad=True)
    assert torch.autograd.gradcheck(lambda out: Categorical().log_density(out, torch.tensor([0, 3, 1])), output)


def test_a_network_of_one_logit_is_refused_and_sent_to_bernoulli():
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    for call in (
        lambda: db.predict(net, torch.randn(4, 3), likelihood=Categorical()),
        lambda: db.evaluate(net, torch.randn(4, 3), torch.zeros(4, dtype=torch.long), likelihood=Categorical()),
        lambda: Categorical().log_density(torch.zeros(4, 1), torch.zeros(4, dtype=torch.long)),
    ):
        with pytest.raises(ValueError, match=r"two classes.*use Bernoulli\(\)"):
            call()


def softmax_network():
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3), nn.Softmax(-1))


def test_a_second_softmax_is_warned_of():
    with pytest.warns(UserWarning, match=r"second softmax.*Categorical\(probabilities=True\)"):
        db.predict(softmax_network(), torch.randn(4, 3), likelihood=Categorical())


def test_a_softmax_network_read_as_probabilities_is_its_logits_read_as_logits():
    net, x, y = softmax_network(), torch.randn(6, 3), torch.randint(3, (6,))
    read = db.predict(net, x, likelihood=Categorical(probabilities=True))
    logits = db.predict(net[:-1], x, likelihood=Categorical())
    torch.testing.assert_close(read.mean, logits.mean)
    torch.testing.assert_close(read.mutual_information, logits.mutual_information, atol=1e-6, rtol=1e-4)
    first = db.evaluate(net, x, y, likelihood=Categorical(probabilities=True))
    assert first.log_likelihood == pytest.approx(db.evaluate(net[:-1], x, y, likelihood=Categorical()).log_likelihood)


def test_logits_are_refused_as_probabilities():
    for likelihood in (Categorical(probabilities=True), Bernoulli(probabilities=True)):
        with pytest.raises(ValueError, match="for logits"):
            likelihood.check(torch.tensor([[2.0, -3.0]]))


def test_probabilities_that_are_linear_in_the_masks_are_sent_to_sampling():
    net = softmax_network()
    with pytest.raises(ValueError, match='use method="sampling"'):
        db.predict(net, 30 * torch.randn(40, 3), likelihood=Categorical(probabilities=True), method="linear")


def test_logits_are_not_taken_for_probabilities(recwarn):
    db.predict(softmax_network()[:-1], torch.randn(40, 3), likelihood=Categorical())
    db.predict(softmax_network()[:-1], torch.randn(40, 3), likelihood=Bernoulli())
    assert not [w for w in recwarn if "second" in str(w.message)]


def test_labels_beyond_the_classes_are_refused_by_name():
    with pytest.raises(ValueError, match="labels from 0 to 2, the network's classes; got labels from 0 to 3"):
        Categorical().check(torch.zeros(2, 3), torch.tensor([0, 3]))


@pytest.mark.parametrize("shape", [(5, 1), (5, 4), (6, 5, 4)])
def test_bernoulli_log_density_and_moments_are_those_of_torch_distributions(shape):
    output, y = torch.randn(shape, dtype=DTYPE), torch.randint(2, (5, shape[-1]))
    oracle = torch.distributions.Bernoulli(logits=output)
    expected = oracle.log_prob(y.to(DTYPE)).sum(-1)
    torch.testing.assert_close(Bernoulli().log_density(output, y), expected)
    torch.testing.assert_close(Bernoulli(probabilities=True).log_density(output.sigmoid(), y), expected)
    torch.testing.assert_close(Bernoulli().mean(output), oracle.mean)
    torch.testing.assert_close(Bernoulli().variance(output), oracle.variance)


def test_one_logit_is_the_categorical_of_zero_and_that_logit():
    logit, y = torch.randn(7, 9, 1, dtype=DTYPE), torch.randint(2, (9, 1))
    both = torch.cat([torch.zeros_like(logit), logit], -1)
    torch.testing.assert_close(Bernoulli().log_density(logit, y), Categorical().log_density(both, y[:, 0]))


def test_one_logit_has_the_information_of_two_classes():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 1))
    two = nn.Sequential(*net[:-1], nn.Linear(16, 2))
    with torch.no_grad():
        for own, other in ((two[-1].weight, net[-1].weight), (two[-1].bias, net[-1].bias)):
            own.copy_(torch.cat([torch.zeros_like(other), other]))
    x = torch.randn(5, 3)
    one, pair = db.predict(net, x, likelihood=Bernoulli()), db.predict(two, x, likelihood=Categorical())
    torch.testing.assert_close(one.mean[:, 0], pair.mean[:, 1])
    torch.testing.assert_close(one.entropy[:, 0], pair.entropy)
    torch.testing.assert_close(one.mutual_information[:, 0], pair.mutual_information, atol=1e-6, rtol=1e-4)


def test_several_labels_are_scored_one_by_one():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
    x, y = torch.randn(30, 3), torch.randint(2, (30, 4)).float()
    result = db.evaluate(net, x, y, likelihood=Bernoulli())
    probability = db.predict(net, x, likelihood=Bernoulli(), masks="row").mean
    assert result.accuracy == pytest.approx(((probability > 0.5) == y.bool()).double().mean().item())


def test_a_second_sigmoid_is_warned_of():
    net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1), nn.Sigmoid())
    with pytest.warns(UserWarning, match=r"Bernoulli\(probabilities=True\)"):
        db.predict(net, torch.randn(4, 3), likelihood=Bernoulli())


@pytest.mark.parametrize("likelihood", [Bernoulli(), Poisson()])
def test_impossible_labels_and_counts_are_refused(likelihood):
    with pytest.raises(ValueError, match=r"`y` must hold (0 and 1|counts)"):
        likelihood.check(torch.zeros(2, 1), torch.tensor([[0.0], [-1.0]]))


def test_poisson_log_density_and_moments_are_those_of_torch_distributions():
    output, y = torch.randn(6, 5, 2, dtype=DTYPE), torch.randint(9, (5, 2))
    oracle = torch.distributions.Poisson(output.exp())
    torch.testing.assert_close(Poisson().log_density(output, y), oracle.log_prob(y.to(DTYPE)).sum(-1))
    torch.testing.assert_close(Poisson().mean(output), oracle.mean)
    torch.testing.assert_close(Poisson().variance(output), oracle.variance)


def test_poisson_probabilities_of_all_counts_sum_to_one():
    density = Poisson().log_density(torch.full((200, 1), math.log(7.0), dtype=DTYPE), torch.arange(200)[:, None])
    assert density.exp().sum().item() == pytest.approx(1.0)


def test_a_network_of_counts_is_judged():
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    result = db.evaluate(net, torch.randn(30, 3), torch.randint(5, (30, 1)), likelihood=Poisson())
    assert math.isfinite(result.log_likelihood)
    assert result.rmse > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_probability_has_the_same_bits_wherever_its_logit_lies(dtype):
    # The elements after the last whole vector of a tensor are computed by other code.
    logits = 3 * torch.randn(200, dtype=dtype, generator=torch.Generator().manual_seed(0))
    whole = Bernoulli().mean(logits)
    torch.testing.assert_close(whole, logits.sigmoid())
    for size in range(1, 40):
        for first in (0, 1, 7):
            assert torch.equal(Bernoulli().mean(logits[first : first + size].clone()), whole[first : first + size])


@pytest.mark.parametrize("label", [-100, 3])
def test_labels_that_no_class_has_are_named(label):
    with pytest.raises(ValueError, match=f"`y` must hold class labels from 0 to 2, .*from {label} to {label}"):
        Categorical().log_density(torch.randn(6, 4, 3), torch.full((4,), label))
