"""Nested outputs."""

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from dropbayes.tracing.outputs import split


@dataclass
class Output:
    logits: torch.Tensor
    name: str


def test_a_dataclass_is_taken_apart_and_put_together():
    tensors, structure = split(Output(torch.ones(2), "kept"))
    rebuilt = structure.build([tensors[0] * 2])
    assert isinstance(rebuilt, Output) and rebuilt.name == "kept" and rebuilt.logits.tolist() == [2.0, 2.0]


def test_dataclasses_inside_others_are_taken_apart_and_put_together():
    @dataclass
    class Heads:
        first: Output
        others: list

    one, two, three = torch.ones(2), torch.zeros(2), torch.full((2,), 3.0)
    given = {"heads": Heads(Output(one, "a"), [Output(two, "b"), 4]), "z": three}
    tensors, structure = split(given)
    assert all(map(torch.equal, tensors, (one, two, three)))
    assert structure == split(given)[1] and structure.build(tensors) == given
    heads = structure.build(range(3), numbers=False)["heads"]
    assert (heads.first, heads.others[0].logits, heads.others[1]) == (Output(0, None), 1, None)


def test_a_tree_keeps_what_is_no_tensor():
    tensors, structure = split({"x": torch.ones(2), "y": (torch.zeros(1), None)})
    rebuilt = structure.build([tensor + 1 for tensor in tensors])
    assert rebuilt["x"].tolist() == [2.0, 2.0] and rebuilt["y"][0].tolist() == [1.0] and rebuilt["y"][1] is None


def test_a_dataclass_that_computes_its_fields_is_rebuilt():
    @dataclass(frozen=True)
    class Derived:
        mean: torch.Tensor
        double: torch.Tensor = field(init=False)

        def __post_init__(self):
            object.__setattr__(self, "double", 2 * self.mean)

    tensors, structure = split(Derived(torch.tensor([3.0])))
    rebuilt = structure.build([tensor.square() for tensor in tensors])
    assert (float(rebuilt.mean), float(rebuilt.double)) == (9.0, 36.0)


def test_dicts_and_lists_of_somebodys_own_class_are_taken_apart_and_put_together():
    class Named(dict):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.__dict__ = self

    class Ordered(OrderedDict): ...

    class Heads(list): ...

    given = Named(first=Ordered(b=torch.ones(2), a="kept"), heads=Heads([torch.zeros(2), {"x": torch.ones(1)}]))
    tensors, structure = split(given)
    assert [tensor.sum() for tensor in tensors] == [2, 0, 1] and structure == split(given)[1]
    rebuilt = structure.build([tensor + 1 for tensor in tensors])
    assert [type(rebuilt), type(rebuilt.first), type(rebuilt.heads)] == [Named, Ordered, Heads]
    assert list(rebuilt.first) == ["b", "a"] and rebuilt.first["a"] == "kept" and rebuilt.heads[1]["x"] == 2


def test_dicts_and_lists_whose_own_init_takes_other_arguments_are_put_together():
    class Pair(dict):
        def __init__(self, a, b):
            super().__init__(a=a, b=b)

    class Single(dict):
        def __init__(self, logits):
            super().__init__(logits=logits)

    class Heads(list):
        def __init__(self, *heads):
            super().__init__(heads)

    a, b = torch.ones(2), torch.zeros(2)
    for given in (Pair(a, b), Single(a), Heads(a, b)):
        tensors, structure = split(given)
        rebuilt = structure.build([tensor + 1 for tensor in tensors])
        values = list(rebuilt.values()) if isinstance(rebuilt, dict) else rebuilt
        assert type(rebuilt) is type(given) and torch.equal(torch.stack(values), torch.stack(tensors) + 1)
