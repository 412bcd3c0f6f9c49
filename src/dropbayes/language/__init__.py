"""Language models: where they may be given dropout, draws as adapters, and tokens shaded by their uncertainty."""

from dropbayes.language.blocks import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks
from dropbayes.language.lora import export_adapters
from dropbayes.language.shading import ShadedText

__all__ = [
    "ShadedText",
    "adapters",
    "attention_outputs",
    "export_adapters",
    "feed_forward_inputs",
    "heads",
    "last_blocks",
]
