"""Tests of the choice of a drop probability for a network trained without dropout."""

import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.language import heads, last_blocks
from dropbayes.predictive.dropout_choice import NextTokens, choose_dropout, text_densities, text_inputs
from tests.language.tiny_models import tiny_model
from tests.predictive.small_problem import numbers, trained


def test_the_chosen_probability_is_the_largest_within_the_tolerance():
    (x, y), net = numbers(1000), trained(drop_prob=0.0)
    choice = choose_dropout(net, x, y, tolerance=0.05)
    within = [p for p, score in choice.tried.items() if score >= choice.plain_log_likelihood - 0.05]
    assert choice.drop_prob == max(within)
    assert choice.log_likelihood == choice.tried[choice.drop_prob]
    wider = choose_dropout(net, x, y, tolerance=10.0)
    assert wider.drop_prob == 0.3
    assert db.sites(choice.network, x)[0].drop_prob == pytest.approx(choice.drop_prob)


def test_when_no_probability_is_within_the_tolerance_it_says_so():
    x = torch.linspace(-1, 1, 200)[:, None].expand(-1, 2).contiguous()
    net = nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight[:], net[0].bias[:] = 50.0, 0.0
        y = net(x) + 0.01 * torch.randn(200, 1)
    choice = choose_dropout(net, x, y, tolerance=0.01)
    assert choice.drop_prob == 0 and choice.network is net and not choice.helps
    assert "no drop probability" in str(choice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"tolerance": -1}, "`tolerance` must be"), ({"drop_probs": [1.0]}, "`drop_probs` must hold")],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        choose_dropout(trained(drop_prob=0.0), *numbers(20), **arguments)


# A text ---------------------------------------------------------------------------------------------------------------


def language_model_and_text():
    """A tiny model fitted to a text in which every token follows from the one before, mostly."""
    model = tiny_model("Llama", vocab_size=12)
    source = torch.Generator().manual_seed(0)
    text = torch.randint(3, 12, (64, 1), generator=source)
    for _ in range(11):
        noise = torch.randint(0, 9, (64, 1), generator=source) * (torch.rand(64, 1, generator=source) < 0.2)
        text = torch.cat([text, 3 + (text[:, -1:] - 2 + noise) % 9], 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(80):
        optimiser.zero_grad()
        model(text[:32], labels=text[:32]).loss.backward()
        optimiser.step()
    return model.eval(), text[32:]


@pytest.fixture(scope="module")
def fitted():
    return language_model_and_text()


def test_on_a_text_the_largest_probability_within_the_nats_per_token_is_chosen(fitted):
    model, text = fitted
    choice = choose_dropout(model, text, tolerance=0.05, where=last_blocks(model, 1), n_draws=8)
    with torch.no_grad():
        assert choice.plain_log_likelihood == pytest.approx(-float(model(text, labels=text).loss), abs=1e-5)
    within = [p for p, score in choice.tried.items() if score >= choice.plain_log_likelihood - 0.05]
    assert choice.drop_prob == max(within) > 0
    assert choice.network.lm_head.weight is model.lm_head.weight
    assert {site.path for site in db.sites(choice.network, text[:2])} == last_blocks(model, 1)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


def test_the_log_likelihood_of_a_text_is_that_of_the_mean_over_draws(fitted):
    model, text = fitted
    choice = choose_dropout(model, text[:4], tolerance=9.0, where=heads(model), drop_probs=[0.2], n_draws=6, seed=3)
    dropped = Logits(db.add_dropout(model, 0.2, where=heads(model)))
    logits = db.draws(dropped, text[:4], n_draws=6, seed=3, masks="row", sampling=db.Sampling(positions="tied"))
    mean = logits[:, :, :-1].softmax(-1).mean(0)
    expected = mean.gather(-1, text[:4, 1:, None]).log().mean()
    assert choice.tried[0.2] == pytest.approx(float(expected), abs=1e-4)


def test_padding_does_not_count(fitted):
    model, text = fitted
    padded = torch.cat([torch.zeros(4, 3, dtype=torch.long), text[:4]], 1)
    inputs = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    options = {"tolerance": 9.0, "where": heads(model), "drop_probs": [0.1], "n_draws": 4}
    bare, behind = choose_dropout(model, text[:4], **options), choose_dropout(model, inputs, **options)
    assert behind.plain_log_likelihood == pytest.approx(bare.plain_log_likelihood, abs=1e-4)
    assert behind.tried[0.1] == pytest.approx(bare.tried[0.1], abs=1e-3)


def test_on_a_text_none_is_an_answer(fitted):
    model, text = fitted
    choice = choose_dropout(model, text, tolerance=0.0, drop_probs=[0.3, 0.5], n_draws=4)
    assert choice.drop_prob == 0 and choice.network is model and "no drop probability" in str(choice)


@pytest.mark.parametrize(
    "x", [torch.ones(3, 4), torch.ones(3, 1, dtype=torch.long), {"pixels": torch.ones(3, 4)}, [1, 2]]
)
def test_what_is_no_text_is_refused(x, fitted):
    with pytest.raises(ValueError, match="`x` must be a text where no `y` is given"):
        choose_dropout(fitted[0], x)


def test_a_network_without_logits_for_every_position_is_refused():
    with pytest.raises(ValueError, match="must be a causal language model"):
        choose_dropout(Summing(), torch.ones(2, 3, dtype=torch.long))


class Summing(nn.Module):
    def forward(self, input_ids):
        return input_ids.float().sum(1, keepdim=True)


class Counting(nn.Module):
    """The next token is the present one plus one, with probability 3/4."""

    def forward(self, input_ids):
        probabilities = torch.full((*input_ids.shape, 5), 0.25 / 4)
        return probabilities.scatter(-1, ((input_ids + 1) % 5)[..., None], 0.75).log()


def test_every_token_has_the_probability_that_those_before_give_it():
    log_probabilities = NextTokens(Counting())(torch.tensor([[0, 1, 2, 0]]))
    torch.testing.assert_close(log_probabilities.exp(), torch.tensor([[0.75, 0.75, 0.0625]]))


def test_probabilities_are_averaged_over_draws_and_logs_over_tokens():
    inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long)}
    draws = torch.tensor([[[0.2, 0.4], [0.6, 0.8]], [[0.4, 0.4], [0.2, 0.4]]]).log()
    expected = (math.log(0.3) + math.log(0.4) + math.log(0.4) + math.log(0.6)) / 4
    assert float(text_densities(draws, inputs).mean()) == pytest.approx(expected)


def test_rows_count_by_their_tokens():
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    inputs = text_inputs({"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": mask})
    logs = torch.tensor([[[-1.0, -2.0], [-50.0, -6.0]]])  # the second row's first token follows padding
    assert float(text_densities(logs, inputs).mean()) == pytest.approx(-9 / 3)


def test_a_text_of_padding_is_refused():
    with pytest.raises(ValueError, match="two tokens at least"):
        text_densities(
            torch.zeros(1, 1, 2), {"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 0]])}
        )
