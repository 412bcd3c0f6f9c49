"""Networks of transformers, with random weights."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from tests.sampling.zoo.specimens import specimen

# Hugging Face, with random weights ------------------------------------------------------------------------------------


def ids() -> Tensor:
    return torch.randint(1, 50, (3, 5))


@functools.cache
def huggingface() -> Any:
    transformers = __import__("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def bert(attention: str) -> tuple[nn.Module, Any]:
    hf = huggingface()
    config = hf.BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
                           max_position_embeddings=16, attn_implementation=attention)  # fmt: skip
    mask = torch.ones(3, 5, dtype=torch.long)
    mask[0, 3:] = 0
    return hf.BertForSequenceClassification(config), {"input_ids": ids(), "attention_mask": mask}


@specimen()
def bert_sdpa():
    return bert("sdpa")


@specimen()
def bert_eager():
    return bert("eager")


@specimen()
def gpt2():
    hf = huggingface()
    config = hf.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=1, eos_token_id=2
    )
    return hf.GPT2Model(config), {"input_ids": ids(), "use_cache": False}


@specimen()
def distilbert():
    hf = huggingface()
    config = hf.DistilBertConfig(
        vocab_size=50, dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=16
    )
    return hf.DistilBertModel(config), {"input_ids": ids()}


@specimen()
def vit():
    hf = huggingface()
    config = hf.ViTConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
                          patch_size=4, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)  # fmt: skip
    return hf.ViTForImageClassification(config), {"pixel_values": torch.randn(3, 3, 8, 8)}


@specimen()
def t5():
    hf = huggingface()
    config = hf.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
    )
    return hf.T5Model(config), {"input_ids": ids(), "decoder_input_ids": ids(), "use_cache": False}
