"""What is known of a network, and how it prints."""

import torch
from torch import nn

import dropbayes as db


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
