"""How a network is drawn from: sites are found, masks are keyed, draws are computed in blocks."""

from dropbayes.sampling.anatomy import Site, Sites
from dropbayes.sampling.functions import draws, function_draw
from dropbayes.sampling.inspection import sites

__all__ = ["Site", "Sites", "draws", "function_draw", "sites"]
