"""Causal language models of transformers, tiny and with random weights, most of them without dropout."""

import torch
import transformers

COMMON = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
SETTINGS = {
    "Llama": GROUPED,
    "Mistral": GROUPED,
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": GROUPED,
    "Gemma": GROUPED,
    "Gemma2": GROUPED,
    "Phi": {"num_key_value_heads": 2},
    "Phi3": {"num_key_value_heads": 2},
    "Olmo": {"num_key_value_heads": 2},
    "Olmo2": {"num_key_value_heads": 2},
    "Mixtral": {**GROUPED, "num_local_experts": 4},
    "Qwen2Moe": {
        "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 16, "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 24,
    },
    "GptOss": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GPTNeoX": {},
    "Falcon": {},
    "Bloom": {},
    "StableLm": {"num_key_value_heads": 2},
    "Mamba": {"state_size": 4},
    "Mamba2": {"state_size": 4, "num_heads": 8, "head_dim": 8, "n_groups": 1},
    "Jamba": {"num_key_value_heads": 2, "num_experts": 4, "mamba_dt_rank": 4, "attn_layer_offset": 0, "attn_layer_period": 2},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}  # fmt: skip


def tiny_model(name, **settings):
    """The causal language model of an architecture, in evaluation mode, with weights large enough to see a change."""
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **SETTINGS[name], **settings})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    return model


def tiny_text(rows=2, length=7, seed=1):
    """Token ids without padding."""
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))
