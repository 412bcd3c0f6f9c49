"""Sampling from a network: its sites, keyed masks, and draws computed in blocks."""

from dropbayes.sampling.anatomy import Site, Sites
from dropbayes.sampling.functions import draws, function_draw
from dropbayes.sampling.inspection import sites

__all__ = ["Site", "Sites", "draws", "function_draw", "sites"]
