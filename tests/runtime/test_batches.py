"""The batches of a loader: what a network takes of them, on its device."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dropbayes as db
from dropbayes.runtime.batches import input_hints, labelled_batch, loaded_batches, network_arguments, takes_whole


class Named(nn.Module):
    def forward(self, x, mask=None):
        return x


def test_the_targets_of_a_batch_are_left_out_for_a_wrapped_network_too():
    class Passing(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = self.same = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    net, x, y = nn.Linear(3, 1), torch.ones(2, 3), torch.ones(2, 1)
    for wrapped in (net, Passing(net), Passing(Passing(net)), nn.DataParallel(net), torch.compile(net)):
        assert network_arguments(wrapped, [x, y]) is x


def test_a_mapping_is_an_argument_where_none_of_its_names_is():
    assert takes_whole(nn.Linear(3, 1), {"x": 1, "y": 2}) and not takes_whole(Named(), {"x": 1, "y": 2})
    assert network_arguments(Named(), {"x": 1, "mask": 2, "y": 3, "labels": 4}) == {"x": 1, "mask": 2}


def test_a_network_that_reads_its_arguments_by_name_is_no_wrapper_of_its_layers():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))

        def forward(self, *args, **kwargs):
            return self.layers(kwargs["a"] + kwargs["b"])

    batch = {"a": torch.ones(2, 3), "b": torch.ones(2, 3)}
    assert not takes_whole(Sum(), batch) and db.draws(Sum(), batch, n_draws=4).shape == (4, 2, 1)


def test_a_sequence_is_an_argument_where_there_is_one_place():
    assert takes_whole(nn.Linear(3, 1), (1, 2)) and not takes_whole(nn.Linear(3, 1), (1,))
    assert not takes_whole(Named(), (1, 2)) and not takes_whole(nn.LSTM(3, 1), (1, 2))


def test_batches_are_moved_to_the_device_of_the_network():
    net = nn.Linear(2, 1, device="meta")
    batch = next(loaded_batches(net, [{"x": torch.ones(2), "name": "a"}]))
    assert batch["x"].device.type == "meta" and batch["name"] == "a"


def test_an_encoder_decoder_begins_with_the_labels_it_is_judged_by():
    class Decoder(nn.Module):
        def forward(self, input_ids, decoder_input_ids=None, labels=None):
            return input_ids

        def prepare_decoder_input_ids_from_labels(self, labels):
            return nn.functional.pad(labels[:, :-1], (1, 0))

    ids, labels = torch.tensor([[5, 6, 7]]), torch.tensor([[3, 4]])
    taken = network_arguments(Decoder(), {"input_ids": ids, "labels": labels})
    assert list(taken) == ["input_ids", "decoder_input_ids"] and taken["decoder_input_ids"].tolist() == [[0, 3]]
    given = {"input_ids": ids, "decoder_input_ids": ids}
    assert network_arguments(Decoder(), given | {"labels": labels}) == given
    assert network_arguments(Decoder(), {"input_ids": ids, "labels": None}) == {"input_ids": ids}


def test_an_input_on_another_device_is_explained_beside_the_message_of_torch():
    elsewhere = nn.Linear(3, 5).to("meta")  # in the place of a GPU
    message = "Expected all tensors to be on the same device"
    hints = input_hints(elsewhere, [torch.randn(4, 3)], message)
    assert hints == ["`x` is on cpu and the network on meta: pass x.to('meta')."]


def test_whole_numbers_for_a_network_of_real_ones_are_explained_beside_the_message_of_torch():
    with pytest.raises(RuntimeError) as caught:
        db.predict(nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.1)), np.ones((4, 3), int))
    expected = "`x` has torch.int64 and the network's weights torch.float32: pass x.to(torch.float32)."
    assert caught.value.__notes__ == [expected]


def test_token_ids_are_not_blamed_for_other_types_inside_the_network():
    message = "mat1 and mat2 must have the same dtype, but got Double and Float"
    assert input_hints(nn.Embedding(5, 3), [torch.ones(4, 2, dtype=torch.long)], message) == []
    given, wanted = torch.float64, torch.float32
    conv = "Input type (double) and bias type (float) should be the same"
    expected = [f"`x` has {given} and the network's weights {wanted}: pass x.to({wanted})."]
    assert input_hints(nn.Linear(2, 1), [torch.ones(4, 2, dtype=given)], conv) == expected


def test_a_loader_that_does_not_shuffle_leaves_the_generator_as_it_was():
    net, loader = nn.Linear(1, 1), DataLoader(torch.ones(6, 1), batch_size=4)
    before = torch.get_rng_state()
    assert [len(batch) for batch in loaded_batches(net, loader)] == [4, 2]
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_without_batches_is_refused():
    with pytest.raises(ValueError, match="`x` must have at least one batch; got an empty DataLoader"):
        list(loaded_batches(nn.Linear(1, 1), []))


class Free(nn.Module):
    def forward(self, x, **others):
        return x


class Whole(nn.Module):
    def forward(self, batch):
        return batch["x"]


@pytest.mark.parametrize(("net", "batch", "expected"), [
    (nn.Identity(), [1, 2], (1, 2)), (nn.Identity(), (1, None), (1, None)),
    (Free(), {"x": 1, "labels": 2}, ({"x": 1}, 2)), (Free(), {"x": 1, "label": 2}, ({"x": 1}, 2)),
    (Free(), {"x": 1, "labels": 2, "y": 3}, ({"x": 1, "y": 3}, 2)), (Whole(), {"x": 1, "target": 2}, ({"x": 1, "target": 2}, 2)),
])  # fmt: skip
def test_a_batch_is_parted_into_arguments_and_targets(net, batch, expected):
    assert labelled_batch(net, batch, "x") == expected


@pytest.mark.parametrize(("batch", "found"), [
    ({"x": 1, "outcome": 2}, "dict with 'x', 'outcome'"), ({"x": 1, "labels": None}, "dict with 'x', 'labels'"),
    ((1, 2, 3), "tuple of 3"), (torch.ones(2), "Tensor"),
])  # fmt: skip
def test_a_batch_without_targets_is_refused_with_what_it_holds(batch, found):
    with pytest.raises(TypeError, match=rf"`held_out` must be .* of dicts with `labels`; got batches of {found}\.$"):
        labelled_batch(Free(), batch, "held_out")
