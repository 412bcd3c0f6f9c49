"""Language models: text under many draws and its uncertainty, where dropout may be put, and tokens shaded."""

from dropbayes.language.blocks import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks
from dropbayes.language.generation import DrawnTexts, Generation, generate, score
from dropbayes.language.meaning import semantic_entropy
from dropbayes.language.shading import ShadedText
from dropbayes.language.uncertainty import SequenceUncertainty, TextUncertainty

__all__ = [
    "DrawnTexts",
    "Generation",
    "SequenceUncertainty",
    "ShadedText",
    "TextUncertainty",
    "adapters",
    "attention_outputs",
    "feed_forward_inputs",
    "generate",
    "heads",
    "last_blocks",
    "score",
    "semantic_entropy",
]
