"""The page reads digits as the library's network does, with the same draws."""

import numpy as np
import pytest
import torch

import dropbayes as db
from experiments.digits import WEIGHTS, digit_network, quantised_weights, restored_weights
from experiments.rotation import rotate
from tests.app.page.javascript import call, call_all, needs_node

KEYS = {"seed": 3, "nDraws": 20, "sampler": "stratified", "replicate": 0}


def images(degrees):
    drawn = call_all([("./runs.mjs", "writtenDigit", kind, degrees) for kind in range(10)])
    return torch.tensor(drawn, dtype=torch.float64).view(10, 1, 28, 28)


@needs_node
def test_the_page_and_the_library_draw_the_same_logits():
    x = images(40.0)
    page = call_all([("./runs.mjs", "digitDraws", str(WEIGHTS), image.flatten().tolist(), KEYS) for image in x])
    expected = db.draws(digit_network().double(), x, n_draws=20, seed=3).transpose(0, 1)
    assert np.allclose(np.array(page).reshape(expected.shape), expected.detach(), atol=1e-5)


@needs_node
def test_entropy_and_mutual_information_are_the_librarys():
    image = images(60.0)[7]
    logits = call("./runs.mjs", "digitDraws", str(WEIGHTS), image.flatten().tolist(), KEYS)
    probabilities = call("digit.js", "softmax", np.array(logits))
    values = call("digit.js", "uncertainty", np.array(probabilities))
    prediction = db.predict(digit_network().double(), image[None], n_draws=20, seed=3, likelihood=db.Categorical())
    assert np.allclose(values["mean"], prediction.mean[0], atol=1e-6)
    assert values["entropy"] == pytest.approx(prediction.entropy.item(), abs=1e-6)
    assert values["mutualInformation"] == pytest.approx(prediction.mutual_information.item(), abs=1e-6)


@needs_node
@pytest.mark.parametrize("degrees", [0.0, 90.0, -37.0])
def test_a_digit_turns_as_in_the_experiment(degrees):
    upright, page = images(0.0)[4], images(degrees)[4]
    assert np.allclose(page, rotate(upright, torch.tensor([degrees], dtype=torch.float64))[0], atol=1e-6)


@needs_node
def test_every_written_digit_is_read_upright():
    assert digit_network().double()(images(0.0)).argmax(-1).tolist() == list(range(10))


@needs_node
def test_strokes_are_scaled_and_centred_as_mnist_is():
    stroke = [[[100.0, 40.0], [100.0, 42.0], [108.0, 60.0]]]
    image = np.array(call("digit.js", "ink", call("digit.js", "centredStrokes", stroke))).reshape(28, 28)
    rows, columns = np.indices((28, 28)) + 0.5
    assert abs((image * rows).sum() / image.sum() - 14) < 0.1 and abs((image * columns).sum() / image.sum() - 14) < 0.1
    assert np.ptp(np.nonzero(image > 0.5)[0]) + 1 <= 20


def test_quantised_weights_are_off_by_half_a_scale_at_most():
    net = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Linear(5, 2))
    tensors = quantised_weights(net)
    state = restored_weights(tensors)
    for name, value in net.state_dict().items():
        bound = 0 if name.endswith("bias") else tensors[name.replace("weight", "scale")].max() / 2
        assert (state[name] - value).abs().max() <= bound * 1.001


def test_the_file_of_weights_is_small():
    assert WEIGHTS.stat().st_size < 60_000
