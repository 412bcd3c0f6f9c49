"""Nested inputs."""

from collections import UserDict

import pytest
import torch
from torch import nn

from dropbayes import predict
from dropbayes.sampling.inputs import as_inputs, copied_cache
from tests.tracing.test_outputs import Output


def test_rows_are_cut_from_tensors_of_the_batch_size_only():
    inputs = as_inputs({"x": torch.arange(6.0).reshape(3, 2), "table": torch.ones(5, 5), "flag": True})
    assert inputs.n_rows == 3
    picked = dict(zip(("x", "table", "flag"), inputs.rows(torch.tensor([2, 0])), strict=True))
    assert torch.equal(picked["x"], torch.tensor([[4.0, 5.0], [0.0, 1.0]]))
    assert torch.equal(picked["table"], torch.ones(5, 5))
    assert picked["flag"] is True


def test_a_mapping_becomes_named_and_a_tuple_positional_arguments():
    seen = []
    as_inputs(UserDict(a=torch.ones(2))).call(lambda **kw: seen.append(sorted(kw)), [torch.ones(2)])
    as_inputs((torch.ones(2), 3)).call(lambda *args: seen.append(len(args)), [torch.ones(2), 3])
    assert seen == [["a"], 2]


def test_padding_repeats_the_last_row():
    inputs = as_inputs(torch.arange(5.0)[:, None])
    (leaf,) = inputs.padded_rows(3, 5, 4)
    assert leaf.flatten().tolist() == [3.0, 4.0, 4.0, 4.0]


def test_rows_lie_on_the_axis_named():
    inputs = as_inputs(torch.arange(12).reshape(4, 3), row_axis=1)
    assert inputs.n_rows == 3
    (leaf,) = inputs.padded_rows(1, 2, 1)
    assert leaf.flatten().tolist() == [1, 4, 7, 10]


@pytest.mark.parametrize("x", [torch.empty(0, 3), torch.tensor(1.0), {"flag": True}])
def test_inputs_without_rows_are_refused(x):
    with pytest.raises(ValueError, match="`x` must"):
        as_inputs(x)


def test_other_data_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"single rows as torch\.stack"):
        as_inputs([1.0, 2.0].__iter__())


def test_an_object_inside_a_tuple_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"`x` must hold a tensor .* take it whole: Sampling\(row_axis=None\)"):
        as_inputs((Output(torch.ones(2, 3), None),))


def test_inputs_made_in_inference_mode_can_be_written_to():
    with torch.inference_mode():
        x, named = torch.ones(2, 3), {"x": torch.ones(2, 3), "n": 4}
    for inputs in (as_inputs(x), as_inputs(named)):
        tensors = [leaf for leaf in inputs.leaves if isinstance(leaf, torch.Tensor)]
        assert not any(tensor.is_inference() for tensor in tensors)


def test_sparse_rows_and_nested_tensors_are_refused_with_the_remedy():
    with pytest.raises(ValueError, match="Pass it dense"):
        as_inputs(torch.eye(3).to_sparse())
    assert as_inputs((torch.ones(4, 2), torch.eye(3).to_sparse())).axes == (0, None)
    with pytest.raises(TypeError, match="Pad them"):
        as_inputs(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged), row_axis=None)


def test_tensors_without_values_are_refused():
    for x in (torch.ones(4, 2, device="meta"), {"x": torch.ones(4, 2), "mask": torch.ones(4, device="meta")}):
        with pytest.raises(ValueError, match="`x` must hold numbers; got a tensor on the meta device"):
            as_inputs(x)


def test_a_loader_is_refused_with_what_takes_it():
    with pytest.raises(
        TypeError, match=r"or a tuple or dict of them; got DataLoader.*DataLoader to `predict` or `evaluate`"
    ):
        as_inputs(torch.utils.data.DataLoader([torch.ones(2)]))


def test_axes_that_are_all_none_make_the_input_one_row():
    x = torch.ones(4, 2)
    assert as_inputs((x, x), row_axis=(None, None)).is_one_row
    assert as_inputs({"x": x}, row_axis={"x": None}).is_one_row


def test_an_empty_cache_of_transformers_is_copied_with_its_layers():
    cache = pytest.importorskip("transformers").DynamicCache()  # which holds the class of the layers it will make

    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    copied = copied_cache(cache)
    copied.update(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), 0)
    copied.layers[0].keys.add_(5)
    assert cache.get_seq_length() == 3 and copied.get_seq_length() == 4
    assert torch.equal(cache.layers[0].keys, torch.ones(1, 2, 3, 4))


def test_a_function_of_the_tensors_is_also_that_of_a_caches():
    cache = pytest.importorskip("transformers").DynamicCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
    inputs = as_inputs({"input_ids": torch.ones(1, 1), "past_key_values": cache}).with_tensors(torch.Tensor.double)
    ids, doubled = inputs.leaves
    assert ids.dtype == doubled.layers[0].keys.dtype == torch.float64
    assert cache.layers[0].keys.dtype == torch.float32


@pytest.mark.parametrize(("index", "got"), [(10, "1 to 10"), (-1, "-1 to 1")])
def test_an_index_beyond_an_embedding_is_named_with_its_size(index, got):
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Dropout(0.5), nn.Linear(12, 1))
    x = torch.ones(40, 3, dtype=torch.long)
    predict(net, x, n_draws=2)
    x[35, 1] = index  # no row that an inspection looks at
    with pytest.raises(IndexError, match=f"`net` must look up entries 0 to 9 of an embedding; got {got}"):
        predict(net, x, n_draws=2)


def test_an_error_of_the_networks_own_index_is_left_as_it_is():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(10, 4)

        def forward(self, x):
            return [self.table(x)][1]

    with pytest.raises(IndexError, match="list index out of range"):
        predict(Reads(), torch.ones(4, 3, dtype=torch.long), n_draws=2)
