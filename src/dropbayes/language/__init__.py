"""Language models: generation under many draws, choices of dropout layers, draws as adapters, shaded tokens."""

from dropbayes.language.blocks import adapters, attention_outputs, feed_forward_inputs, heads, last_blocks
from dropbayes.language.generation import DrawnTexts, Generation, generate
from dropbayes.language.lora import export_adapters
from dropbayes.language.scoring import score
from dropbayes.language.shading import ShadedText
from dropbayes.language.uncertainty import (
    SequenceUncertainty,
    TextUncertainty,
    TokenUncertainty,
    entailment,
    semantic_entropy,
)

__all__ = [
    "DrawnTexts",
    "Generation",
    "SequenceUncertainty",
    "ShadedText",
    "TextUncertainty",
    "TokenUncertainty",
    "adapters",
    "attention_outputs",
    "entailment",
    "export_adapters",
    "feed_forward_inputs",
    "generate",
    "heads",
    "last_blocks",
    "score",
    "semantic_entropy",
]
