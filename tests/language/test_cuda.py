"""Language models on a GPU: the texts and the numbers of a CPU."""

import copy

import pytest
import torch

import dropbayes as db
from tests.language.test_generation import OPTIONS, lively, prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
QUANTITIES = ("token_log_prob", "token_entropy", "token_mutual_information", "draw_log_probs")


@pytest.fixture(params=["gpt2", "bart"])
def models(request):
    model = lively(request.param)
    return model, copy.deepcopy(model).cuda()


def on_gpu(batch):
    return {name: value.cuda() for name, value in batch.items()}


def test_a_text_is_that_of_the_cpu(models):
    host, device = models
    expected = db.language.generate(host, prompts(), n_draws=4, seed=3, **OPTIONS)
    for given in (on_gpu(prompts()), prompts()):  # the inputs follow the model
        found = db.language.generate(device, given, n_draws=4, seed=3, **OPTIONS)
        assert torch.equal(found.tokens.cpu(), expected.tokens)
        for quantity in QUANTITIES:
            torch.testing.assert_close(getattr(found, quantity).cpu(), getattr(expected, quantity), atol=2e-3, rtol=0)


def test_the_texts_of_single_draws_are_those_of_the_cpu(models):
    host, device = models
    expected = db.language.generate(host, prompts(), n_draws=3, per_draw=True, **OPTIONS)
    found = db.language.generate(device, on_gpu(prompts()), n_draws=3, per_draw=True, **OPTIONS)
    assert torch.equal(found.tokens.cpu(), expected.tokens)


def test_an_answer_is_judged_as_on_the_cpu(models):
    host, device = models
    answer = torch.tensor([[5, 6, 7], [8, 0, 0]])
    expected = db.language.score(host, prompts(), answer, n_draws=4)
    for given, its in ((on_gpu(prompts()), answer.cuda()), (prompts(), answer)):
        found = db.language.score(device, given, its, n_draws=4)
        assert torch.equal(found.mask.cpu(), expected.mask)
        torch.testing.assert_close(
            found.draw_log_probs.cpu(), expected.draw_log_probs, atol=2e-3, rtol=0, equal_nan=True
        )
