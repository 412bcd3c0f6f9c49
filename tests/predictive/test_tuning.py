"""Rates fitted after training: known ones are found again, the weights stay, and nothing is ever worse."""

import copy
import math

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.language import heads, last_blocks
from dropbayes.layers.conversion import settable_drop_probs
from dropbayes.linear import covariance
from dropbayes.predictive import tune_dropout
from dropbayes.predictive.evaluation import fitted_noise
from dropbayes.predictive.tuning import HeldOut, NextTokens, Parts, text_densities, text_inputs
from tests.language.tiny_models import tiny_model, tiny_text
from tests.predictive.small_problem import numbers, trained
from tests.sampling.zoo.specimens import Module


def of_one_layer(drop_prob, n=2000):
    """A network, and outcomes that are its draws: the mask of each row is its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 40), nn.ReLU(), nn.Dropout(drop_prob), nn.Linear(40, 1))
    x = torch.randn(n, 2)
    y = db.draws(net, x, n_draws=1, masks="row", sampling=db.Sampling(sampler="independent"))[0] + 0.05 * torch.randn(
        n, 1
    )
    return net, x, y


def test_the_rate_and_the_noise_of_the_outcomes_are_found():
    net, x, y = of_one_layer(0.3, n=1000)
    net[2].p = 0.05
    tuning = tune_dropout(net, x, y, n_draws=400)
    assert tuning.drop_probs["2"] == pytest.approx(0.3, abs=0.03) and tuning.network[2].p == tuning.drop_probs["2"]
    assert isinstance(tuning.likelihood, db.Gaussian)
    assert 200 < tuning.likelihood.precision < 800  # 400; most of the variance is that of the masks
    assert tuning.gain > 3 * tuning.standard_error and net[2].p == 0.05


def test_rates_do_not_depend_on_the_unit_of_the_outcomes():
    net, x, y = of_one_layer(0.3, n=600)
    tuning = tune_dropout(net, x, y, n_draws=50)
    with torch.no_grad():
        net[3].weight *= 1e-9
        net[3].bias *= 1e-9
    small = tune_dropout(net, x, 1e-9 * y, n_draws=50)
    assert small.drop_probs == pytest.approx(tuning.drop_probs, abs=1e-3)
    assert small.likelihood.precision == pytest.approx(1e18 * tuning.likelihood.precision, rel=1e-2)


def test_a_network_without_dropout_is_given_it_and_keeps_its_weights():
    net, x, y = of_one_layer(0.3)
    plain = nn.Sequential(net[0], net[1], net[3])
    before = copy.deepcopy(plain.state_dict())
    tuning = tune_dropout(plain, x, y, where=["2"])
    assert tuning.drop_probs["2"] == pytest.approx(0.3, abs=0.03) and tuning.gain > 0
    assert [site.drop_prob for site in db.sites(tuning.network, x)] == [tuning.drop_probs["2"]]
    for weights in (plain.state_dict(), tuning.network.state_dict()):
        assert all(torch.equal(weights[key], before[key]) for key in before)


def test_a_network_that_dropout_cannot_help_is_returned_as_it_is():
    torch.manual_seed(0)
    net, x = nn.Linear(3, 1), torch.randn(300, 3)
    y = net(x).detach() + 0.5 * torch.randn(300, 1)
    tuning = tune_dropout(net, x, y)
    assert tuning.log_likelihood >= tuning.plain_log_likelihood
    assert tuning.network is net or tuning.gain > 0


def test_a_harmful_fit_is_not_returned(monkeypatch):
    """Rates far too large on purpose: the rows that were not fitted refuse them."""
    net, x, y = of_one_layer(0.3, n=300)
    y = net.eval()(x).detach() + 0.01 * torch.randn(300, 1)
    monkeypatch.setattr(Parts, "fit", lambda self, *_: iter([dict.fromkeys(self.settings, 0.5)]))
    tuning = tune_dropout(net, x, y)
    assert tuning.network is net and not tuning.drop_probs and tuning.gain == 0
    assert isinstance(tuning.likelihood, db.Gaussian)
    assert tuning.likelihood.precision == pytest.approx(1e4, rel=0.2)
    assert "no drop probabilities were good enough" in str(tuning)


@pytest.mark.slow
def test_each_unit_has_the_rate_of_its_outcomes():
    torch.manual_seed(0)
    net, x, keep = nn.Sequential(nn.Dropout(0.1), nn.Linear(6, 1)), torch.randn(1500, 6), torch.ones(6)
    nn.init.constant_(net[1].weight, 1.0)
    keep[:3] = 0.6
    with torch.no_grad():
        y = net[1](x * torch.bernoulli(keep.expand_as(x)) / keep) + 0.2 * torch.randn(len(x), 1)
    alike, tuning = (tune_dropout(net, x, y, per=per) for per in ("layer", "unit"))
    found = tuning.drop_probs["0"]
    assert found[:3].min() > 0.25 and found[3:].max() < 0.1
    assert tuning.log_likelihood > alike.log_likelihood and tuning.gain > 3 * tuning.standard_error
    assert tuning.network.state_dict().keys() == net.state_dict().keys() and " to " in str(tuning)
    torch.testing.assert_close(tuning.network.eval()(x), net.eval()(x))
    drawn = db.predict(tuning.network, x[:50], n_draws=2000).epistemic[:, 0]
    torch.testing.assert_close(drawn.double(), x[:50].double().square() @ (found / (1 - found)), rtol=0.1, atol=1e-3)


@pytest.mark.slow
def test_units_of_a_network_without_dropout_have_rates_as_well():
    net, x, y = of_one_layer(0.3, n=600)
    tuning = tune_dropout(nn.Sequential(net[0], net[1], net[3]), x, y, per="unit", n_draws=50)
    assert [len(rates) for rates in tuning.drop_probs.values()] == [2, 40] and tuning.gain > 0
    assert len(db.sites(tuning.network, x)) == 2


@pytest.mark.parametrize("y", [torch.zeros(20).long(), torch.zeros(20, 5, 1)], ids=["classes", "positions"])
def test_units_without_rates_of_their_own_are_refused(y):
    net = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 1 if y.is_floating_point() else 2))
    with pytest.raises(ValueError, match=r"`per`.*unit"):
        tune_dropout(net, torch.randn(*y.shape[:2], 3) if y.dim() > 1 else torch.randn(20, 3), y, per="unit")


def test_an_output_without_an_axis_of_its_own_is_tuned_alike():
    net, x, y = of_one_layer(0.3, n=300)
    flat = Module(lambda m, x: m.net(x)[:, 0], net=net)
    one, other = tune_dropout(flat, x, y[:, 0], n_draws=50), tune_dropout(net, x, y, n_draws=50)
    assert one.log_likelihood == pytest.approx(other.log_likelihood)


def test_the_noise_is_that_of_the_draws():
    """Two draws one apart, and outcomes near one of them: their distance to it is the noise, not that to both."""
    torch.manual_seed(0)
    outputs = torch.tensor([0.0, 1.0])[:, None, None].expand(2, 1000, 1).double()
    y = torch.randint(2, (1000, 1)) + 0.1 * torch.randn(1000, 1)
    assert fitted_noise(outputs, y).precision == pytest.approx(100, rel=0.1)


@pytest.mark.slow
def test_classes_of_an_overconfident_network_gain():
    torch.manual_seed(0)
    x = torch.randn(600, 2)
    y = (x[:, 0] + torch.randn(600) > 0).long()
    net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))
    with torch.no_grad():  # right on average, far too sure
        net[2].weight.mul_(0)
        net[0].weight.mul_(0.2)
        net[2].weight.copy_(20 * torch.stack([-net[0].weight[:, 0], net[0].weight[:, 0]]))
    tuning = tune_dropout(net, x, y, n_draws=50)
    assert tuning.gain > 0.1 and set(tuning.drop_probs) == {"0", "2"} and isinstance(tuning.likelihood, db.Categorical)
    assert f"{tuning.gain:+.4f}" in str(tuning)


@pytest.mark.parametrize(("seed", "best"), [(2, 0.5), (5, 0.0)])
def test_an_almost_flat_likelihood_is_followed_to_its_best_rates(seed, best):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Dropout(0.1), nn.Linear(12, 2)).double().eval()
    x, y = torch.randn(60, 3, dtype=torch.float64), (torch.rand(60, 2) < 0.5).double()  # labels by chance
    parts = Parts(net, HeldOut(net, x, y, db.Bernoulli()), {"2": 0.1}, db.Sampling())
    (rates,) = parts.fit(torch.arange(60))
    assert rates["2"] == pytest.approx(best, abs=0.01)


def test_the_covariance_is_the_weighted_sum_of_the_layers():
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4),
                        nn.Linear(8, 2)).double()  # fmt: skip
    x = torch.randn(6, 2, dtype=torch.float64)
    held = HeldOut(net, x, torch.zeros(6, 2), None)
    parts = Parts(net, held, settable_drop_probs(net, db.sites(net, x)), db.Sampling())
    assert list(parts.settings) == ["2", "5"]
    net[2].p, net[5].p = 0.1, 0.3
    ratios = torch.tensor([0.1 / 0.9, 0.3 / 0.7], dtype=torch.float64)
    torch.testing.assert_close(torch.einsum("g,grkl->rkl", ratios, parts.covariances[:-1]), covariance(net, x))


@pytest.mark.slow
def test_recurrent_and_attention_modules_have_settings_too():
    net = Module(lambda m, x: m.head(m.att(*[m.rnn(x)[0]] * 3)[0].mean(1)), head=nn.Linear(4, 1),
                 rnn=nn.LSTM(3, 4, 2, dropout=0.2, batch_first=True),
                 att=nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True))  # fmt: skip
    torch.manual_seed(0)
    x = torch.randn(600, 5, 3)
    y = db.draws(net, x, n_draws=1, masks="row", sampling=db.Sampling(sampler="independent"))[0]
    tuning = tune_dropout(net, x, y)
    assert set(tuning.drop_probs) == {"rnn", "att"} and tuning.network.rnn.dropout == tuning.drop_probs["rnn"]


def test_dropout_of_ignored_modules_is_not_tuned():
    net, x, y = of_one_layer(0.3, n=300)
    net = nn.Sequential(nn.Dropout(0.1), *net)
    ignoring = db.Sampling(ignore_modules=["0"])
    for per in ("layer", "network"):
        tuning = tune_dropout(net, x, y, per=per, n_draws=50, sampling=ignoring)
        assert set(tuning.drop_probs) == {"3"} and tuning.network[0].p == 0.1


def test_dropout_without_a_module_is_refused_with_a_remedy():
    net = Module(lambda m, x: m.a(nn.functional.dropout(x, 0.5, m.training)), a=nn.Linear(3, 1))
    with pytest.raises(ValueError, match=r"can be set.*nn\.Dropout"):
        tune_dropout(net, torch.randn(20, 3), torch.randn(20, 1))


def test_too_few_outcomes_are_refused():
    with pytest.raises(ValueError, match="`y` must have one outcome for each of the 20 rows"):
        tune_dropout(nn.Linear(2, 1), torch.randn(20, 2), torch.randn(19, 1))


@pytest.mark.parametrize(
    ("likelihood", "y", "message"),
    [
        (db.Bernoulli(), 2.0, "`y` must hold 0 and 1 for Bernoulli; got values from 2 to 2"),
        (db.Poisson(), -1.0, "`y` must hold counts .* got -1"),
        (db.Categorical(), 3, "`y` must hold class labels from 0 to 2"),
    ],
)
def test_outcomes_that_the_likelihood_cannot_have_are_refused(likelihood, y, message):
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 3))
    with pytest.raises(ValueError, match=message):
        tune_dropout(
            net, torch.randn(20, 2), torch.full((20,) if isinstance(y, int) else (20, 3), y), likelihood=likelihood
        )


def test_outputs_that_move_in_few_directions_are_tuned():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 15), nn.Unflatten(1, (5, 3)))
    x = torch.randn(37, 3) * torch.logspace(-1, 1, 37)[:, None]  # some rows move far more than their mean
    tuning = tune_dropout(net, x, torch.randint(3, (37, 5)), likelihood=db.Categorical(class_axis=-1), n_draws=5)
    assert tuning.log_likelihood >= tuning.plain_log_likelihood


# One rate for the whole network ---------------------------------------------------------------------------------------


def test_the_chosen_probability_is_the_largest_within_the_tolerance():
    (x, y), net = numbers(100), trained(drop_prob=0.0)
    tuning = tune_dropout(net, x, y, per="network", tolerance=0.05, n_draws=20)
    within = [p for p, score in tuning.tried.items() if score >= tuning.plain_log_likelihood - 0.05]
    assert set(tuning.drop_probs.values()) == {max(within)} and tuning.log_likelihood == tuning.tried[max(within)]
    assert [site.drop_prob for site in db.sites(tuning.network, x)] == [pytest.approx(max(within))] * 2
    assert f"chosen: drop_prob {max(within):g}" in str(tuning)
    wider = tune_dropout(net, x, y, per="network", tolerance=10.0, n_draws=20)
    assert set(wider.drop_probs.values()) == {0.3}


def test_without_a_tolerance_the_best_probability_is_taken():
    net, x, y = of_one_layer(0.3, n=600)
    net[2].p = 0.05
    tuning = tune_dropout(net, x, y, per="network", drop_probs=(0.01, 0.3, 0.9))
    assert tuning.drop_probs == {"2": 0.3} == {"2": max(tuning.tried, key=tuning.tried.get)}
    assert tuning.network[2].p == 0.3 and net[2].p == 0.05 and tuning.gain > 3 * tuning.standard_error


@pytest.mark.slow
def test_a_layer_that_add_dropout_replaces_has_the_rate_too():
    torch.manual_seed(0)
    net = Module(lambda m, x: m.head(m.rnn(x)[0].mean(1)), head=nn.Linear(4, 1), rnn=nn.GRU(3, 4, batch_first=True))
    x = torch.randn(60, 5, 3)
    y = 3 * torch.randn(60, 1)
    for per in ("network", "layer"):
        tolerance = {"tolerance": 9.0} if per == "network" else {}
        tuning = tune_dropout(net, x, y, per=per, where=["rnn"], n_draws=50, **tolerance)
        rates = {site.drop_prob for site in db.sites(tuning.network, x)} if tuning.drop_probs else set()
        assert rates == set(tuning.drop_probs.values())


def test_when_no_probability_is_within_the_tolerance_it_says_so():
    x = torch.linspace(-1, 1, 200)[:, None].expand(-1, 2).contiguous()
    net = nn.Sequential(nn.Linear(2, 1))
    with torch.no_grad():
        net[0].weight[:], net[0].bias[:] = 50.0, 0.0
        y = net(x) + 0.01 * torch.randn(200, 1)
    tuning = tune_dropout(net, x, y, per="network", tolerance=0.01)
    assert not tuning.drop_probs and tuning.network is net and tuning.gain == 0
    assert "no drop probabilities" in str(tuning)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tolerance": -1, "per": "network"}, "`tolerance` must be"),
        ({"tolerance": 1}, "`tolerance` must be"),
        ({"tolerance": "low", "per": "network"}, "`tolerance` must be"),
        ({"drop_probs": [1.0]}, "`drop_probs` must hold"),
        ({"drop_probs": ["low"]}, r"`drop_probs` must hold probabilities in \(0, 1\); got \['low'\]"),
        ({"drop_probs": 0.1}, r"`drop_probs` must hold probabilities in \(0, 1\); got 0.1"),
        ({"per": "head"}, "`per` must be"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tune_dropout(trained(drop_prob=0.0), *numbers(20), **arguments)


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


@pytest.mark.slow
def test_on_a_text_the_largest_probability_within_the_nats_per_token_is_chosen(fitted):
    model, text = fitted
    options = {"tolerance": 0.05, "drop_probs": [0.01, 0.1, 0.3], "n_draws": 8}
    tuning = tune_dropout(model, text, per="network", where=last_blocks(model, 1), **options)
    with torch.no_grad():
        assert tuning.plain_log_likelihood == pytest.approx(-float(model(text, labels=text).loss), abs=1e-5)
    within = [p for p, score in tuning.tried.items() if score >= tuning.plain_log_likelihood - 0.05]
    assert set(tuning.drop_probs.values()) == {max(within)}
    assert tuning.network.lm_head.weight is model.lm_head.weight
    assert {site.path for site in db.sites(tuning.network, text[:2])} == last_blocks(model, 1)


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids).logits


@pytest.mark.slow
def test_the_log_likelihood_of_a_text_is_that_of_the_mean_over_draws(fitted):
    model, text = fitted
    tuning = tune_dropout(
        model, text[:4], per="network", tolerance=9.0, where=heads(model), drop_probs=[0.2], n_draws=6, seed=3
    )
    dropped = Logits(db.add_dropout(model, 0.2, where=heads(model)))
    logits = db.draws(dropped, text[:4], n_draws=6, seed=3, masks="row", sampling=db.Sampling(positions="tied"))
    mean = logits[:, :, :-1].softmax(-1).mean(0)
    expected = mean.gather(-1, text[:4, 1:, None]).log().mean()
    assert tuning.tried[0.2] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.slow
def test_padding_does_not_count(fitted):
    model, text = fitted
    padded = torch.cat([torch.zeros(4, 3, dtype=torch.long), text[:4]], 1)
    inputs = {"input_ids": padded, "attention_mask": (padded > 0).long()}
    options = {"per": "network", "tolerance": 9.0, "where": heads(model), "drop_probs": [0.1], "n_draws": 4}
    bare, behind = tune_dropout(model, text[:4], **options), tune_dropout(model, inputs, **options)
    assert behind.plain_log_likelihood == pytest.approx(bare.plain_log_likelihood, abs=1e-4)
    assert behind.tried[0.1] == pytest.approx(bare.tried[0.1], abs=1e-3)


@pytest.mark.slow
def test_on_a_text_none_is_an_answer(fitted):
    model, text = fitted
    tuning = tune_dropout(model, text, tolerance=0.0, drop_probs=[0.3, 0.5], n_draws=4)
    assert not tuning.drop_probs and tuning.network is model and "nats per token" in str(tuning)


@pytest.mark.parametrize(
    "x", [torch.ones(3, 4), torch.ones(3, 1, dtype=torch.long), {"pixels": torch.ones(3, 4)}, [1, 2]]
)
def test_what_is_no_text_is_refused(x):
    with pytest.raises(ValueError, match="`x` must be a text where no `y` is given"):
        tune_dropout(tiny_model("Llama", vocab_size=12), x, per="network")


def test_a_network_without_logits_for_every_position_is_refused():
    with pytest.raises(ValueError, match="must be a causal language model"):
        tune_dropout(Summing(), torch.ones(2, 3, dtype=torch.long), per="network")


class Summing(nn.Module):
    def forward(self, input_ids):
        return input_ids.float().sum(1, keepdim=True)


@pytest.mark.slow
def test_a_text_has_one_rate_for_the_whole_network(fitted):
    tuning = tune_dropout(*fitted, drop_probs=[0.3], n_draws=2)
    assert list(tuning.tried) == [0.3]
    with pytest.raises(ValueError, match=r"`per` must be \"network\", or, with outcomes"):
        tune_dropout(*fitted, per="layer")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rates"),
    [("GPT2", dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)), ("Llama", {"attention_dropout": 0.1})],
)
def test_the_attention_of_a_language_model_has_the_rate_too(name, rates):
    model, ids = tiny_model(name, **rates), tiny_text(rows=6)
    tuning = tune_dropout(model, ids, drop_probs=[0.3], tolerance=100.0, n_draws=2)
    found = [{site.drop_prob for site in db.sites(one, {"input_ids": ids})} for one in (model, tuning.network)]
    assert found == [{0.1}, {0.3}]


def test_a_rate_is_set_where_it_stands_and_nothing_else_of_its_dropout_changes():
    """Of attached dropout its units stay; of an attention with one rate both its masks have the new one."""
    net = Module(lambda m, x: m.head(m.att(x, x, x)[0].mean(1)), head=nn.Linear(4, 1),
                 att=nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True))  # fmt: skip
    torch.manual_seed(0)
    x, net = torch.randn(30, 5, 4), db.add_dropout(net, 0.2, units="element")
    options = {"per": "network", "drop_probs": (0.1,), "tolerance": 10.0, "n_draws": 10}
    tuning = tune_dropout(net, x, torch.randn(30, 1), **options)
    assert {site.drop_prob for site in db.sites(tuning.network, x)} == {0.1}
    assert [site.shape for site in db.sites(tuning.network, x)] == [site.shape for site in db.sites(net, x)]
    (hook,) = tuning.network.head._forward_pre_hooks.values()
    assert hook.units == "element" and {site.drop_prob for site in db.sites(net, x)} == {0.2}


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
    logs = torch.tensor([[[-1.0, -2.0], [-6.0, -50.0]]])  # the second row ends in padding
    assert float(text_densities(logs, inputs).mean()) == pytest.approx(-9 / 3)


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_padding_before_a_text_shifts_no_position(name):
    model, text = tiny_model(name), tiny_text(rows=2)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), text], 1)
    inputs = text_inputs({"input_ids": padded, "attention_mask": (padded > 0).long()})
    found, expected = (text_densities(NextTokens(model)(**x)[None], x) for x in (inputs, {"input_ids": text}))
    torch.testing.assert_close(found, expected)


def test_a_text_whose_tokens_have_no_probability_is_refused():
    with pytest.raises(ValueError, match="`net` gave NaN"):
        text_densities(torch.full((1, 2, 2), math.nan), {"input_ids": torch.ones(2, 3, dtype=torch.long)})


def test_a_text_of_padding_is_refused():
    with pytest.raises(ValueError, match="two tokens at least"):
        text_densities(
            torch.zeros(1, 1, 2), {"input_ids": torch.zeros(1, 3).long(), "attention_mask": torch.tensor([[0, 1, 0]])}
        )


def test_a_network_inside_another_that_distributes_it_is_tuned():
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)), torch.randn(30, 2)
    y = torch.randn(30, 1)
    ours, plain = (tune_dropout(one, x, y, per="network", n_draws=4) for one in (nn.DataParallel(net), net))
    assert ours.tried == plain.tried and ours.drop_probs == plain.drop_probs
