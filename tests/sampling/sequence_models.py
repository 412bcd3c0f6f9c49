"""Tiny language models of many architectures, with dropout switched on wherever the architecture has a place for it."""

import functools

import torch
from torch import nn

VOCABULARY = 40
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
    "attention_dropout": 0.2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPECIAL = {**_TOKENS, "decoder_start_token_id": 1, "forced_eos_token_id": None}
_BART = {
    **_SPECIAL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2,
}  # fmt: skip
_T5 = {**_SPECIAL, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.2}
_STATE_SPACE = {
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False,
}  # fmt: skip

# Name: the class, and what its configuration says.
DECODERS = {
    "gpt2": ("GPT2LMHeadModel", {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "llama": ("LlamaForCausalLM", _SIZES),
    "opt": ("OPTForCausalLM", {**_SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.2}),
    "bloom": ("BloomForCausalLM", {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
    "gpt_neo": ("GPTNeoForCausalLM", {**_TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4, "max_position_embeddings": 64, "embed_dropout": 0.2, "resid_dropout": 0.2, "attention_dropout": 0.2}),
    "gpt_neox": ("GPTNeoXForCausalLM", {**_SIZES, "hidden_dropout": 0.2}),
    "gptj": ("GPTJForCausalLM", {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}),
    "codegen": ("CodeGenForCausalLM", {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64, "embd_pdrop": 0.2, "resid_pdrop": 0.2, "attn_pdrop": 0.2}),
    "falcon": ("FalconForCausalLM", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_dropout": 0.2, "attention_dropout": 0.2}),
    "phi": ("PhiForCausalLM", {**_SIZES, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
    "phi3": ("Phi3ForCausalLM", {**_SIZES, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
    "mistral": ("MistralForCausalLM", {**_SIZES, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", _SIZES),
    "qwen3": ("Qwen3ForCausalLM", _SIZES),
    "gemma2": ("Gemma2ForCausalLM", {**_SIZES, "sliding_window": 4, "attn_implementation": "eager"}),
    "gemma3": ("Gemma3ForCausalLM", {**_SIZES, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}),
    "cohere": ("CohereForCausalLM", _SIZES),
    "stablelm": ("StableLmForCausalLM", {**_SIZES, "hidden_dropout": 0.2}),
    "starcoder2": ("Starcoder2ForCausalLM", {**_SIZES, "residual_dropout": 0.2, "embedding_dropout": 0.2}),
    "olmo2": ("Olmo2ForCausalLM", _SIZES),
    "granite": ("GraniteForCausalLM", _SIZES),
    "seed_oss": ("SeedOssForCausalLM", {**_SIZES, "residual_dropout": 0.2}),
    "mixtral": ("MixtralForCausalLM", {**_SIZES, **_EXPERTS}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**_SIZES, **_EXPERTS}),
    "xglm": ("XGLMForCausalLM", {**_TOKENS, "d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": 64, "dropout": 0.2, "attention_dropout": 0.2, "activation_dropout": 0.2}),
    "biogpt": ("BioGptForCausalLM", {**_SIZES, "hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}),
}  # fmt: skip
ENCODER_DECODERS = {
    "t5": ("T5ForConditionalGeneration", _T5),
    "bart": ("BartForConditionalGeneration", _BART),
    "mbart": ("MBartForConditionalGeneration", _BART),
    "marian": ("MarianMTModel", {**_BART, "pad_token_id": 0}),
    "pegasus": ("PegasusForConditionalGeneration", _BART),
    "m2m_100": ("M2M100ForConditionalGeneration", {**_BART, "encoder_layerdrop": 0.3, "decoder_layerdrop": 0.0}),
    "umt5": ("UMT5ForConditionalGeneration", _T5),
}
HYBRIDS = {
    "jamba": ("JambaForCausalLM", {**_SIZES, **_STATE_SPACE, **_EXPERTS, "num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4, "expert_layer_offset": 3}),
    "bamba": ("BambaForCausalLM", {**_SIZES, **_STATE_SPACE, "attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1ForCausalLM", {**_SIZES, **_STATE_SPACE, "mamba_d_ssm": 64}),
    "qwen3_next": ("Qwen3NextForCausalLM", {**_SIZES, **_EXPERTS, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24}),
}  # fmt: skip
STATE_SPACES = {
    "mamba": ("MambaForCausalLM", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
    "mamba2": ("Mamba2ForCausalLM", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1, "chunk_size": 8}),
    "falcon_mamba": ("FalconMambaForCausalLM", {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}  # fmt: skip
MODELS = DECODERS | ENCODER_DECODERS | HYBRIDS | STATE_SPACES


@functools.cache
def sequence_model(name):
    """The model with random weights, in evaluation mode."""
    import transformers

    class_name, options = MODELS[name]
    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options))
    if name in STATE_SPACES:  # which have no dropout of their own
        for layer in model.backbone.layers:
            layer.mixer.in_proj = nn.Sequential(nn.Dropout(0.2), layer.mixer.in_proj)
            layer.mixer.out_proj = nn.Sequential(nn.Dropout(0.2), layer.mixer.out_proj)
    return model.eval()
