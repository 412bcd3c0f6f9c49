"""Language models: where they may be given dropout, and their tokens shaded by uncertainty."""

from dropbayes.language.blocks import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks
from dropbayes.language.shading import ShadedText

__all__ = ["ShadedText", "adapters", "attention_outputs", "feed_forward_inputs", "heads", "last_blocks"]
