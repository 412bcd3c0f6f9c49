"""Sampling from a network: its sites, keyed masks, and draws computed in blocks."""

from dropbayes.sampling.functions import draws, evaluation_output, function_draw, is_stochastic, keep_state
from dropbayes.sampling.inputs import Inputs, as_inputs, cloned_leaves, copied_cache, is_cache
from dropbayes.sampling.inspection import Inspection, inspect, is_current, sites
from dropbayes.sampling.masks import Keys, derived_seed, keep_mask
from dropbayes.sampling.perceptron import Perceptron, as_perceptron
from dropbayes.sampling.plan import Block, Plan, make_plan, mask_spec, move_row_axis
from dropbayes.sampling.probes import ProbeFailed, Prober
from dropbayes.sampling.profile import Profile, Site
from dropbayes.sampling.settings import Sampling, check_sampling
from dropbayes.sampling.source import KeyedSource, SiteSource, UnsupportedStrategy
from dropbayes.sampling.strategies import rows_first
from dropbayes.sampling.streaming import LogMean, Mean, Moments, result_dtype
from dropbayes.sampling.training_mode import UncertaintyWarning
from dropbayes.sampling.trials import chosen_strategy
from dropbayes.tracing import Sites
from dropbayes.tracing.views import View, eagerly

__all__ = [
    "Block",
    "Inputs",
    "Inspection",
    "KeyedSource",
    "Keys",
    "LogMean",
    "Mean",
    "Moments",
    "Perceptron",
    "Plan",
    "ProbeFailed",
    "Prober",
    "Profile",
    "Sampling",
    "Site",
    "SiteSource",
    "Sites",
    "UncertaintyWarning",
    "UnsupportedStrategy",
    "View",
    "as_inputs",
    "as_perceptron",
    "check_sampling",
    "chosen_strategy",
    "cloned_leaves",
    "copied_cache",
    "derived_seed",
    "draws",
    "eagerly",
    "evaluation_output",
    "function_draw",
    "inspect",
    "is_cache",
    "is_current",
    "is_stochastic",
    "keep_mask",
    "keep_state",
    "make_plan",
    "mask_spec",
    "move_row_axis",
    "result_dtype",
    "rows_first",
    "sites",
]
