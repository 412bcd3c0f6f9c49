"""The doctor: what is sampled, what is not and why."""

import torch
from torch import nn

import dropbayes as db

X = torch.randn(5, 4)


class Mixed(nn.Module):
    """Dropout of several kinds: switched off, always on, never reached; and normalisation."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2)
        self.off, self.unused, self.last = nn.Dropout(0.0), nn.Dropout(0.4), nn.Linear(8, 1)

    def forward(self, x):
        x = self.off(self.drop(self.norm(self.first(x))))
        return self.last(nn.functional.dropout(x, 0.1, training=True))


def by_path(net, **settings):
    return {finding.path: finding for finding in db.doctor(net, X, **settings).findings}


def test_each_place_is_described():
    found = by_path(Mixed().eval())
    assert (found["drop"].drop_prob, found["drop"].shape, found["drop"].rows) == (0.2, "1x8", "axis 0")
    assert (found["drop"].flag, found["drop"].in_eval, found["drop"].here) == ("eval", "off", "sampled")
    assert (found["(network)"].before, found["(network)"].in_eval) == ("last", "draws")
    assert found["off"].here == "not: drop_prob is 0"
    assert found["unused"].here == "not: not met by this input" and found["unused"].drop_prob == 0.4
    assert (found["norm"].in_train, found["norm"].here) == ("moves its statistics", "fixed")


def test_what_is_ignored_is_said_to_be():
    found = by_path(Mixed(), sampling=db.Sampling(ignore_modules="drop"))
    assert found["drop"].here == "not: ignored" and found["drop"].flag == "train"


def test_the_notes_say_what_other_ways_would_have_done():
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))
    sampled, zero, moved = db.doctor(net, X).notes
    assert sampled == "1 of 1 site sampled" and "the variance would be 0" in zero and "train(), 1 would" in moved
    assert not any("would be 0" in note for note in db.doctor(Mixed(), X).notes)


def test_a_refused_network_is_described_with_the_reason():
    diagnosis = db.doctor(nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.0)), X)
    assert diagnosis.notes[0] == "0 of 0 sites sampled" and diagnosis.notes[1].startswith(
        "refused: `net` must have dropout"
    )

    class Centred(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x - x.mean(0), 0.5, self.training)

    assert "refused: " in str(db.doctor(Centred(), X))


def test_the_network_is_not_changed_and_the_table_shows_in_a_notebook():
    net = Mixed()
    before = [tensor.clone() for tensor in net.state_dict().values()]
    diagnosis = db.doctor(net, X)
    assert all(map(torch.equal, before, net.state_dict().values())) and net.training
    assert "<td>moves its statistics</td>" in diagnosis._repr_html_()
    assert str(diagnosis).split()[:3] == ["path", "kind", "drop_prob"]


def test_a_lazy_network_is_described_and_stays_lazy():
    net = nn.Sequential(nn.LazyLinear(8), nn.Dropout(0.1), nn.LazyLinear(1))
    diagnosis = db.doctor(net, X)
    assert diagnosis.notes[1] == "refused: `net` must be initialised; '0' is lazy. Run it once on a batch: net(x)."
    assert [finding.path for finding in diagnosis.findings] == ["1"] and net[0].has_uninitialized_params()
