"""What is known of a network, and how it prints."""

import random

import pytest
import torch
from torch import nn

import dropbayes as db
from dropbayes.sampling.inputs import as_inputs
from dropbayes.sampling.inspection import inspect
from dropbayes.tracing import RowLayout
from tests.sampling.zoo import Module


def test_sites_tell_what_where_and_before_which_layer():
    net = nn.Sequential(nn.Dropout(0.1), nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.25), nn.Flatten(), nn.Linear(8, 1))
    found = db.sites(net, torch.zeros(5, 2))
    assert [(s.path, s.kind, s.drop_prob, s.shape, s.before) for s in found] == [
        ("0", "dropout", 0.1, (1, 2), "1"),
        ("3", "dropout", 0.25, (1, 8), "5"),
    ]
    assert "before weight layer" in str(found) and str(found).count("\n") == 4


def test_shared_prefix_is_the_share_of_work_before_the_first_site():
    late = nn.Sequential(nn.Linear(50, 500), nn.Linear(500, 50), nn.Dropout(0.1), nn.Linear(50, 1))
    early = nn.Sequential(nn.Dropout(0.1), nn.Linear(50, 500), nn.Linear(500, 1))
    assert db.sites(late, torch.zeros(1, 50)).prefix_share > 0.98
    assert db.sites(early, torch.zeros(1, 50)).prefix_share == 0


def test_a_network_without_sites_prints_as_such():
    assert "no site" in str(db.sites(nn.Linear(2, 1), torch.zeros(1, 2)))


def test_sites_show_themselves_in_a_notebook_with_names_escaped():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.add_module("<b>", nn.Dropout(0.2))

        def forward(self, x):
            return self._modules["<b>"](x)

    found = db.sites(Net(), torch.zeros(2, 3))
    assert "<td>&lt;b&gt;</td>" in found._repr_html_() and "<td>0.2</td>" in found._repr_html_()
    assert repr(found) == "Sites(1: dropout; 0 % shared by all draws)"


def profile(forward, x=None, **children):
    net = Module(forward, d=nn.Dropout(0.5), **children)
    return inspect(net, as_inputs(torch.linspace(-1, 1, 12).reshape(4, 3) if x is None else x)).profile


def test_a_plain_network_has_nothing_special():
    plain = profile(lambda m, x: m.a(m.d(x)), a=nn.Linear(3, 2))
    assert plain.outputs == (RowLayout(0, 1),) and plain.rows_together and plain.last_layer and plain.n_random == 1
    special = ("reads_rows", "rows_depend", "draws_branch", "rows_branch", "by_name", "host_random", "seeds_torch",
               "is_stateful", "writes_input", "one_row")  # fmt: skip
    assert not any(getattr(plain, name) for name in special)


def test_a_branch_on_a_draw_is_known():
    found = profile(lambda m, x: m.d(x) if torch.rand([]) < 0.3 else x)
    assert found.draws_branch and found.by_name and not found.rows_branch


def test_a_branch_on_a_dropped_row_is_known():
    assert profile(lambda m, x: m.d(x) if m.d(x).sum() > 0 else x).rows_branch


def test_a_number_read_from_the_rows_is_known():
    found = profile(lambda m, x: m.d(x) * x.abs().max().item() ** 0)
    assert found.rows_depend and found.reads_rows and not found.draws_branch


def test_a_branch_on_the_rows_is_known():
    found = profile(lambda m, x: m.d(x) if (x > 50).any() else 2 * m.d(x))
    assert found.reads_rows and not found.rows_depend


def test_generators_of_the_host_are_known():
    assert profile(lambda m, x: m.d(x) * (random.random() < 0.5)).host_random


def test_a_state_and_a_write_to_the_input_are_known():
    def forward(m, x):
        m.calls = getattr(m, "calls", 0) + 1
        return m.d(x.mul_(2))

    found = profile(forward)
    assert found.is_stateful and found.writes_input


def test_a_network_that_drops_nothing_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"no dropout that is switched on.*add_dropout"):
        inspect(Module(lambda m, x: m.d(x), d=nn.Dropout(0.0)), as_inputs(torch.ones(2, 3))).profile.check_random()


def test_a_network_that_drops_everything_is_refused_as_a_prior_refuses_it():
    with pytest.raises(ValueError, match=r"`keep_prob` must lie in \(0, 1\]; got 0.0"):
        inspect(Module(lambda m, x: m.d(x), d=nn.Dropout(1.0)), as_inputs(torch.ones(2, 3))).profile.check_random()
