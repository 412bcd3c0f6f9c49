"""Tests of adding dropout to networks: same function in evaluation, every weight layer random in training."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import dropbayes
from dropbayes.layers import BernoulliNoise, Conv2d, Prior, keep_probs, keep_probs_by_order, kl_coefficients
from dropbayes.layers.conversion import add_dropout
from dropbayes.sampling import sites


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


class DropoutCalls(torch.overrides.TorchFunctionMode):
    """The drop probabilities of the F.dropout calls made inside: what an interceptor of operations can see."""

    def __init__(self):
        self.drop_probs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.dropout:
            self.drop_probs.append((kwargs or {}).get("p", args[1] if len(args) > 1 else 0.5))
        return func(*args, **(kwargs or {}))


def dropout_calls(net, *inputs, **kwargs):
    with DropoutCalls() as calls:
        net(*inputs, **kwargs)
    return calls.drop_probs


class Residual(nn.Module):
    def __init__(self, inner, outer, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer)
        self.conv2, self.bn2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer)
        self.shortcut = nn.Conv2d(inner, outer, 1, stride)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ConvNet(nn.Module):
    """Shaped like torchvision's residual networks."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4, 6, 2), Residual(6, 8, 2))
        self.fc = nn.Linear(8, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def test_a_convnet_gets_dropout_before_each_of_its_eight_weight_layers():
    net, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    bayesian = add_dropout(net, 0.25)
    torch.testing.assert_close(bayesian(x), net(x), rtol=0, atol=0)
    assert dropout_calls(bayesian, x) == [0.25] * 8
    assert dropout_calls(net, x) == []  # the original is untouched
    assert not torch.equal(bayesian.train()(x), bayesian(x))


def test_the_state_dict_travels_both_ways():
    net = ConvNet()
    bayesian = add_dropout(net)
    bayesian.load_state_dict(ConvNet().state_dict())
    net.load_state_dict(bayesian.state_dict())
    for name, value in bayesian.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=0, atol=0)


def test_weights_of_the_copy_are_its_own():
    net = nn.Linear(2, 2)
    bayesian = add_dropout(net)
    with torch.no_grad():
        bayesian.weight.zero_()
    assert net.weight.abs().sum() > 0


def test_without_a_copy_the_tensors_are_those_of_the_network():
    net, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    view = add_dropout(net, 0.25, copy=False)
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        assert all(own is other for (_, own), (_, other) in zip(tensors(view), tensors(net), strict=True))
    assert dropout_calls(view, x) == [0.25] * 8 and dropout_calls(net, x) == []
    torch.testing.assert_close(view(x), net(x), rtol=0, atol=0)


class Reading(nn.Module):
    """Reads the weights of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.read, self.called = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.called(x @ self.read.weight)


def test_a_layer_that_is_not_called_is_named():
    with pytest.warns(UserWarning, match="read are not called"):
        add_dropout(Reading(), x=torch.ones(1, 3))


def test_a_second_call_replaces_the_first():
    net, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    assert dropout_calls(add_dropout(add_dropout(net, 0.1), 0.1), x) == [0.1] * 8
    assert dropout_calls(add_dropout(add_dropout(net, 0.1), 0.3), x) == [0.3] * 8


def test_dropout_already_before_a_layer_is_not_doubled():
    net = nn.Sequential(nn.Dropout(0.4), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).eval()
    assert dropout_calls(add_dropout(net, 0.1), torch.ones(2, 3)) == [0.4, 0.1]


def test_copies_and_pickles_stay_random_and_separate():
    bayesian = add_dropout(ConvNet().eval(), 0.2)
    x = torch.randn(2, 3, 8, 8)
    for twin in (copy.deepcopy(bayesian), pickle.loads(pickle.dumps(bayesian))):
        assert dropout_calls(twin, x) == [0.2] * 8
        torch.testing.assert_close(twin(x), bayesian(x), rtol=0, atol=0)


def test_where_limits_by_predicate_and_by_names():
    net, x = ConvNet().eval(), torch.randn(2, 3, 8, 8)
    assert dropout_calls(add_dropout(net, where=lambda name, module: isinstance(module, nn.Linear)), x) == [0.1]
    assert dropout_calls(add_dropout(net, where=["stem", "blocks.1"]), x) == [0.1] * 4
    assert dropout_calls(add_dropout(net, where="fc"), x) == [0.1]
    with pytest.raises(ValueError, match="`where` must name modules"):
        add_dropout(net, where=["head"])
    with pytest.raises(ValueError, match="`where` must choose a weight layer"):
        add_dropout(net, where=lambda name, module: False)


def test_keep_probs_are_read_back():
    bayesian = add_dropout(ConvNet(), 0.25)
    assert set(keep_probs_by_order(bayesian).values()) == {0.75}
    assert kl_coefficients(bayesian, prior=Prior(length_scale=2.0))["fc.weight"] == pytest.approx(4 / 0.75)


def test_inputs_are_dropped_with_drop_prob_and_scaled_by_one_over_keep():
    net = nn.Linear(2, 1, bias=False).double()
    net.weight.data = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    out = add_dropout(net, 0.2)(torch.ones(40_000, 2, dtype=torch.float64))
    assert set(out.flatten().tolist()) == {0.0, 1.25}
    assert abs((out == 0).double().mean() - 0.2) < 4 * math.sqrt(0.2 * 0.8 / 40_000)


@pytest.mark.parametrize("layer", [nn.Linear(1, 5), nn.Conv2d(1, 5, 3)])
def test_a_layer_with_one_input_unit_is_warned_of(layer):
    net = nn.Sequential(layer, nn.ReLU())
    with pytest.warns(
        UserWarning, match=r"^0 has a single input unit, .* probability 0.1: those draws ignore the input"
    ):
        add_dropout(net, 0.1)
    add_dropout(net, 0.0)  # drops nothing
    add_dropout(nn.Sequential(*net, nn.Flatten(), nn.Linear(5, 1)), 0.1, where=["3"])


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("setting", [{}, {"num_layers": 2, "bidirectional": True, "dropout": 0.4, "batch_first": True}])
def test_every_weight_matrix_of_a_recurrent_layer_is_dropped(make, setting):
    layer = make(3, 4, **setting).eval()
    bayesian, x = add_dropout(layer, 0.3), torch.randn(5, 5, 3)
    torch.testing.assert_close(bayesian(x)[0], layer(x)[0], rtol=0, atol=0)
    assert bayesian.state_dict().keys() == layer.state_dict().keys()
    kept = keep_probs(bayesian, x)
    assert kept == pytest.approx({name: 0.7 for name, _ in layer.named_parameters() if "weight" in name})
    again = pickle.loads(pickle.dumps(add_dropout(copy.deepcopy(bayesian), 0.2)))
    assert set(keep_probs(again, x).values()) == {0.8}


class NamedLSTM(nn.LSTM):
    """A subclass without code of its own."""


class ScaledLSTM(nn.LSTM):
    def forward(self, x, state=None):
        return super().forward(2 * x, state)


class ScaledAttention(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(2 * x, x, x)


def test_a_subclass_of_a_recurrent_layer_is_dropped_where_it_runs_the_code_of_its_base():
    x = torch.randn(5, 5, 3)
    assert set(keep_probs(add_dropout(NamedLSTM(3, 4), 0.3), x).values()) == {0.7}


@pytest.mark.parametrize("layer", [ScaledLSTM(4, 4), ScaledAttention(4, 2)], ids=["LSTM", "attention"])
def test_a_subclass_with_code_of_its_own_keeps_it_and_is_named(layer):
    x = torch.randn(5, 5, 4)
    with pytest.warns(UserWarning, match="^0 are left as they are"):
        bayesian = add_dropout(nn.Sequential(layer), 0.3).eval()
    torch.testing.assert_close(bayesian(x)[0], layer.eval()(x)[0], rtol=0, atol=0)


def test_a_projecting_lstm_is_dropped_before_its_projection_too():
    layer = nn.LSTM(3, 5, proj_size=2).double().eval()
    bayesian, x = add_dropout(layer, 0.3), torch.randn(4, 2, 3).double()
    assert keep_probs(bayesian, x) == pytest.approx({"weight_ih_l0": 0.7, "weight_hh_l0": 0.7, "weight_hr_l0": 0.7})
    quiet = add_dropout(layer, 0.0).train()
    torch.testing.assert_close(quiet(x)[0], layer(x)[0])


class Stepper(nn.Module):
    """A loop over time around a cell."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        state, outputs = None, []
        for step in x.unbind(1):
            state = self.cell(step, state)
            outputs.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(outputs, 1)


@pytest.mark.parametrize("make", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_has_one_mask_for_all_the_steps_of_a_forward_pass(make):
    net = Stepper(make(3, 4)).double().eval()
    bayesian, x = add_dropout(net, 0.5), torch.randn(6, 5, 3).double()
    torch.testing.assert_close(bayesian(x), net(x), rtol=0, atol=0)
    assert dropout_calls(bayesian, x) == [
        0.5,
        0.5,
    ]  # one mask for the input and one for the state, not one for each step
    torch.manual_seed(0)
    output = bayesian.train()(x)
    torch.manual_seed(0)
    masks = [F.dropout(torch.ones(6, width, dtype=x.dtype), 0.5) for width in (3, 4)]
    for row in range(6):
        masked = copy.deepcopy(net)
        with torch.no_grad():
            masked.cell.weight_ih *= masks[0][row]
            masked.cell.weight_hh *= masks[1][row]
        torch.testing.assert_close(output[row : row + 1], masked(x[row : row + 1]))
    draws = dropbayes.draws(bayesian, x, n_draws=20, seed=0)
    assert (draws.std(0) > 0).all()


def test_a_cell_that_is_the_network_is_warned_of():
    with pytest.warns(UserWarning, match="draws new masks at every call"):
        add_dropout(nn.GRUCell(2, 3))


def test_packed_sequences_have_a_mask_each():
    bayesian = add_dropout(nn.GRU(8, 4), 0.5)
    lengths = torch.tensor([2, 5, 3])
    packed = pack_padded_sequence(torch.ones(5, 3, 8), lengths, enforce_sorted=False)
    output, valid = pad_packed_sequence(bayesian(packed)[0])
    assert valid.tolist() == lengths.tolist()
    first = output[0]  # equal inputs, so rows differ by their masks alone
    assert (first[0] != first[1]).any() and (first[1] != first[2]).any() and (first[0] != first[2]).any()


def test_the_doubt_of_a_convolution_is_that_of_the_layer_that_draws_its_weights():
    torch.manual_seed(1)
    conv = nn.Conv2d(3, 8, 3)
    ours = Conv2d(3, 8, 3, noise=BernoulliNoise(0.2))
    ours.load_state_dict(conv.state_dict())
    x = torch.rand(1, 3, 12, 12).expand(4000, -1, -1, -1)
    deviations = [torch.relu(net(x)).mean((1, 2, 3)).std() for net in (add_dropout(conv, 0.2), ours)]
    assert deviations[0].item() == pytest.approx(deviations[1].item(), rel=0.08)
    assert torch.relu(add_dropout(conv, 0.2, units="element")(x)).mean((1, 2, 3)).std() < 0.5 * deviations[1]


def test_time_first_networks_are_asked_for_their_row_axis():
    net = nn.Sequential(nn.Embedding(5, 3), nn.LSTM(3, 4))
    with pytest.warns(UserWarning, match="`row_axis=1`"):
        add_dropout(net)
    words = torch.tensor([0, 1, 0, 1])[:, None].expand(4, 30)
    vectors = add_dropout(net, 0.5, row_axis=1)[0](words)
    assert torch.equal(vectors[0], vectors[2]) and torch.equal(vectors[1], vectors[3])
    assert (vectors[0] == 0).all(-1).any() and not (vectors[0] == 0).all()


def test_parametrised_layers_are_dropped_and_matrices_of_unknown_code_are_named():
    net = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(3, 4)),
        nn.ReLU(),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        Mixing(),
    ).eval()
    with pytest.warns(UserWarning, match="^3 are left as they are"):
        bayesian = add_dropout(net, 0.3)
    x = torch.ones(2, 3)
    torch.testing.assert_close(bayesian(x), net(x), rtol=0, atol=0)
    assert dropout_calls(bayesian, x) == [0.3] * 3
    assert keep_probs(bayesian, x) == pytest.approx(
        {"0.weight": 0.7, "2.weight": 0.7, "3.matrix": 1.0, "3.inner.weight": 0.7}
    )
    assert (dropbayes.draws(bayesian, x, n_draws=20).std(0) > 0).all()
    again = pickle.loads(pickle.dumps(copy.deepcopy(bayesian[3])))
    assert dropout_calls(again, torch.ones(2, 4)) == [0.3]


class Mixing(nn.Module):
    """A matrix called neither `weight` nor used by a layer, and a layer inside."""

    def __init__(self):
        super().__init__()
        self.matrix, self.position, self.inner = (
            nn.Parameter(torch.randn(4, 2)),
            nn.Parameter(torch.zeros(2)),
            nn.Linear(2, 1),
        )

    def forward(self, x):
        return self.inner(x @ self.matrix + self.position)


def test_what_cannot_be_dropped_is_named():
    with pytest.warns(UserWarning, match="^0 are left as they are: an nn.EmbeddingBag"):
        add_dropout(nn.Sequential(nn.EmbeddingBag(4, 3), nn.Linear(3, 1)))


class SharedDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.drop = nn.Linear(3, 4), nn.Linear(4, 1), nn.Dropout(0.4)

    def forward(self, x):
        return self.fc2(self.drop(torch.relu(self.fc1(x))))


class DropoutLast(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Dropout(0.4))), nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.parametrize("network", [SharedDropout, DropoutLast])
def test_dropout_of_a_class_is_seen_with_an_input_and_warned_of_without(network):
    x = torch.ones(2, 3)
    assert dropout_calls(add_dropout(network(), 0.1, x=x), x) == [0.1, 0.4]
    with pytest.warns(UserWarning, match="may be given a second one"):
        assert dropout_calls(add_dropout(network(), 0.1), x) == [0.1, 0.4, 0.1]


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("kdim", [None, 6])
def test_attention_is_unchanged_in_evaluation_and_drops_all_four_projections(batch_first, kdim):
    attention = nn.MultiheadAttention(8, 2, batch_first=batch_first, kdim=kdim, vdim=kdim).double().eval()
    bayesian = add_dropout(attention, 0.3)
    query, key = torch.randn(4, 4, 8).double(), torch.randn(4, 4, kdim or 8).double()
    for need_weights in (True, False):
        expected, weights = attention(query, key, key, need_weights=need_weights)
        got, got_weights = bayesian(query, key, key, need_weights=need_weights)
        torch.testing.assert_close((got, got_weights), (expected, weights), rtol=0, atol=0)
    assert dropout_calls(bayesian, query, key, key) == [0.3] * 4
    coefficients = kl_coefficients(bayesian, prior=Prior(bias_length_scale=0.5))
    assert coefficients["out_proj.weight"] == pytest.approx(1 / 0.7)
    assert coefficients["out_proj.bias"] == coefficients["in_proj_bias"] == 0.25


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_encoder_is_unchanged_in_evaluation_with_padding():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x, padding = torch.randn(3, 4, 8), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)
    bayesian = add_dropout(encoder, 0.1, x=x)
    with torch.no_grad():
        expected, got = encoder(x, src_key_padding_mask=padding), bayesian(x, src_key_padding_mask=padding)
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


def test_keyword_inputs_and_both_inputs_of_a_bilinear_layer_are_dropped():
    assert dropout_calls(add_dropout(nn.Linear(2, 2), 0.3), input=torch.ones(1, 2)) == [0.3]
    bilinear, x = add_dropout(nn.Bilinear(2, 3, 4), 0.3), (torch.ones(1, 2), torch.ones(1, 3))
    assert dropout_calls(bilinear, *x) == dropout_calls(bilinear, x[0], input2=x[1]) == [0.3, 0.3]


@pytest.mark.parametrize("drop_prob", [-0.1, 1.0, float("nan"), "0.1", None])
def test_invalid_drop_probs_are_refused(drop_prob):
    with pytest.raises(ValueError, match=r"`drop_prob` must lie in \[0, 1\)"):
        add_dropout(nn.Linear(1, 1), drop_prob)


def test_rows_lie_along_the_first_or_the_second_axis():
    with pytest.raises(ValueError, match=r"`row_axis` must be one of None, 0, 1; got 7"):
        add_dropout(nn.Linear(1, 1), 0.1, row_axis=7)


def test_a_network_without_a_weight_layer_is_refused():
    with pytest.raises(ValueError, match="`where` must choose a weight layer of `net`; got None for a ReLU"):
        add_dropout(nn.ReLU())


def hugging_face_models():
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = transformers.BertConfig(vocab_size=30, max_position_embeddings=16, **small, **quiet)
    yield transformers.BertForSequenceClassification(bert), {"input_ids": torch.randint(30, (2, 7))}
    gpt = transformers.GPT2Config(
        vocab_size=30, n_positions=16, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0
    )
    yield transformers.GPT2LMHeadModel(gpt), {"input_ids": torch.randint(30, (2, 7))}
    vit = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **small, **quiet)
    yield transformers.ViTForImageClassification(vit), {"pixel_values": torch.randn(2, 3, 8, 8)}


def test_hugging_face_models_are_unchanged_in_evaluation_and_random_in_every_weight_layer():
    for net, batch in hugging_face_models():
        net.eval()
        bayesian = add_dropout(net, 0.2)
        with torch.no_grad():
            expected, again = net(**batch).logits, bayesian(**batch).logits
            assert (bayesian.train()(**batch).logits - expected).abs().max() > 1e-4
            bayesian.eval()
        torch.testing.assert_close(again, expected, rtol=0, atol=0)
        bayesian.load_state_dict(net.state_dict())
        used = [p for p in dropout_calls(bayesian, **batch) if p > 0]
        assert used == [0.2] * len(keep_probs_by_order(bayesian)), type(net).__name__
        assert set(keep_probs_by_order(bayesian).values()) == {0.8}


def test_converted_hugging_face_models_can_be_drawn_from():
    for net, batch in hugging_face_models():
        bayesian = add_dropout(net.eval(), 0.2)
        logits = dropbayes.draws(bayesian, batch, n_draws=4, seed=0).logits
        assert (logits.std(0) > 0).all()
        draw = dropbayes.function_draw(bayesian, index=2, n_draws=4, seed=0)
        torch.testing.assert_close(draw(batch).logits, logits[2])


@pytest.mark.parametrize("inner", ["before", "after"])
def test_dropout_at_the_edge_of_an_inner_sequence_is_not_given_twice(inner):
    first, last = [nn.Linear(3, 8), nn.ReLU()], [nn.Linear(8, 1)]
    layers = (
        [nn.Sequential(*first, nn.Dropout(0.2)), *last]
        if inner == "before"
        else [*first, nn.Dropout(0.2), nn.Sequential(*last)]
    )
    found = sites(add_dropout(nn.Sequential(*layers), 0.1), torch.zeros(2, 3))
    assert [site.drop_prob for site in found] == pytest.approx([0.1, 0.2])


def test_what_is_no_ordinary_module_is_refused():
    with pytest.raises(TypeError, match=r"`net` must be a torch.nn.Module; got function"):
        add_dropout(F.relu)
    scripted = torch.jit.trace(nn.Linear(2, 1), torch.ones(1, 2))
    for net, name in ((scripted, r"\(network\)"), (nn.Sequential(nn.Linear(2, 2), scripted), "1")):
        with pytest.raises(TypeError, match=f"`net` must be an ordinary module: {name} is scripted or traced"):
            add_dropout(net)


@pytest.mark.parametrize("copied", [True, False], ids=["copied", "shared"])
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("compute", [nn.utils.weight_norm, lambda layer: prune.l1_unstructured(layer, "weight", 0.5)])
def test_weights_that_an_earlier_pass_computed_are_copied(compute, copied):
    torch.manual_seed(0)
    net, x = nn.Sequential(compute(nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2)).eval(), torch.randn(3, 4)
    expected = net(x)  # with derivatives, of which torch makes no deep copy
    bayesian = add_dropout(net, 0.2, copy=copied)
    torch.testing.assert_close(bayesian(x), expected)
    assert [site.drop_prob for site in sites(bayesian, x)] == [0.2, 0.2]
    assert all((a is b) != copied for a, b in zip(bayesian.parameters(), net.parameters(), strict=True))


@pytest.mark.parametrize(
    ("where", "kind", "message"),
    [
        (3, TypeError, "must be names of modules or a function"),
        ([3, "a"], ValueError, r"must name modules of `net`; got \[3, 'a'\]"),
    ],
)
def test_a_choice_of_layers_that_is_no_name_is_refused(where, kind, message):
    with pytest.raises(kind, match=f"`where` {message}"):
        add_dropout(nn.Linear(2, 1), where=where)
