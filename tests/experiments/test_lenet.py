"""LeNet."""

import torch

import dropbayes as db
from dropbayes.processes import theory_report
from experiments import lenet


def test_lenet_has_its_sites_where_it_says():
    x = torch.rand(2, 1, 28, 28)
    for sites, n_sites in (("last", 1), ("all", 3), ("channels", 4)):
        assert len(db.sites(lenet.lenet(sites, channels=(2, 3), hidden=8), x)) == n_sites


def test_only_the_masks_of_channels_are_all_draws_of_some_distribution_over_weights():
    x = torch.rand(2, 1, 28, 28)
    prior = db.Prior(length_scale=1.0)
    readings = {
        sites: str(theory_report(lenet.lenet(sites, channels=(2, 3), hidden=8), x, prior, n_data=10))
        for sites in ("all", "channels")
    }
    assert "every site is a draw of some q(W)" in readings["channels"] and "MAP" not in readings["channels"]
    assert "every site is a draw of some q(W)" not in readings["all"]
