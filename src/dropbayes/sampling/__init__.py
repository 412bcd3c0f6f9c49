"""How a network is drawn from: its stochastic sites are found, its masks are keyed, its draws are computed in tiles."""

from dropbayes.sampling.anatomy import Site, Sites, sites
from dropbayes.sampling.plan import draws, function_draw

__all__ = ["Site", "Sites", "draws", "function_draw", "sites"]
