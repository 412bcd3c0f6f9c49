"""The reading of a forward pass: which operations are random, which multiply a weight, and what a site's mask is."""

from dropbayes.tracing.gates import AtMeans
from dropbayes.tracing.interception import Interception, view_at_sites
from dropbayes.tracing.random_numbers import draw_or_mean
from dropbayes.tracing.recorder import Recorder, is_ours
from dropbayes.tracing.sites import PositionAxis, RowLayout, Site, SiteNames, Sites
from dropbayes.tracing.sources import (
    NEUTRAL,
    Given,
    Neutral,
    Ones,
    Source,
    UnsupportedStrategy,
    neutral_uniform,
    scaled_product,
)
from dropbayes.tracing.states import version
from dropbayes.tracing.watch import SharedWrite, Watch, reads_of

__all__ = [
    "NEUTRAL",
    "AtMeans",
    "Given",
    "Interception",
    "Neutral",
    "Ones",
    "PositionAxis",
    "Recorder",
    "RowLayout",
    "SharedWrite",
    "Site",
    "SiteNames",
    "Sites",
    "Source",
    "UnsupportedStrategy",
    "Watch",
    "draw_or_mean",
    "is_ours",
    "neutral_uniform",
    "reads_of",
    "scaled_product",
    "version",
    "view_at_sites",
]
