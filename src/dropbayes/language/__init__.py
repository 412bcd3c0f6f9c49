"""Language models: where they may be given dropout."""

from dropbayes.language.blocks import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks

__all__ = ["adapters", "attention_outputs", "feed_forward_inputs", "heads", "last_blocks"]
