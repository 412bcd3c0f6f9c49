"""LeNet."""

import torch

import dropbayes as db
from experiments import lenet


def test_lenet_has_its_sites_where_it_says():
    x = torch.rand(2, 1, 28, 28)
    for sites, n_sites in (("last", 1), ("all", 3)):
        assert len(db.sites(lenet.lenet(sites, channels=(2, 3), hidden=8), x)) == n_sites
