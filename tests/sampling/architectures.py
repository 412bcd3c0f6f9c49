"""Every architecture of the installed transformers, as small as its configuration allows, with its dropout switched on."""

import inspect
import re
from collections.abc import Mapping

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

DROP_PROB = 0.15
MOST_PARAMETERS = 16_000_000
NAMES = [name for name in MODEL_MAPPING_NAMES if name in CONFIG_MAPPING_NAMES]

# The size of what a whole number in a configuration counts, by its name; the first that fits, and never a larger one.
SIZES = [
    (r"feat_extract", None),  # as many as there are kernels
    (r"vocab_size", 96),
    (r"(token_id|token_ids|_index|_id)$", 80),
    (r"(^|_)(experts?_per_tok|top_?k|selected_experts|shared_experts)", 2),
    (r"experts?($|_)(?!.*(size|dim))", 4),
    (r"(moe|expert).*(size|dim)", 16),
    (r"(n_group|topk_group)$", 1),
    (r"(head.*(dim|size)|d_head|d_kv|rope.*dim|key_size)", 8),
    (r"(kv|key_value).*head", 2),
    (r"head", 4),
    (r"(conv_pos_embeddings|conv_pos_embedding_groups)", 4),
    (r"(^|_)n?(um)?_?(hidden_)?layers?$|depth$|n_layer", 2),
    (r"rank", 16),
    (r"(image_size|img_size|input_size)$", 32),
    (r"patch_size$", 8),
    (r"(position|n_ctx|seq_length|max_length)", 128),
    (r"num_mel_bins", 16),
    (r"(num_channels|in_channels|kernel_size|type_vocab_size|temporal_patch|tubelet|stride|chunk_size)", None),
    (r"(intermediate|ffn|d_ff|d_inner|mlp_dim|feedforward|n_inner)", 48),
    (r"(hidden|d_model|embd|embed|dim|width|size|channels|filters|state)", 32),
    (r"(queries|query_tokens|latents|codebook)", 8),
]


def smaller(name, value):
    """The value of a setting in a small configuration; None to leave it."""
    if isinstance(value, bool):
        return None
    if "drop" in name:
        layerdrop = "layerdrop" in name or "layer_drop" in name
        return (0.0 if layerdrop else DROP_PROB) if isinstance(value, float) or value == 0 else None
    if name in ("mask_time_prob", "mask_feature_prob"):  # an augmentation of training, not dropout
        return 0.0
    if isinstance(value, int) and value > 2:
        size = next((size for pattern, size in SIZES if re.search(pattern, name)), 64 if value > 512 else None)
        return size if size is not None and size < value else None
    if isinstance(value, (list, tuple)) and value and all(type(entry) is int for entry in value):
        if re.search(r"depth|layers|blocks", name):
            return [1] * len(value)
        if "head" in name:
            return [2] * len(value)
        if re.search(r"hidden|dim|width|embed|channels", name) and max(value) > 16:
            order = sorted(set(value))
            return [8 * (1 + order.index(entry)) for entry in value]
    return None


def small_settings(config):
    """The settings of a configuration that are to change, those of its parts included."""
    settings = {}
    for name in sorted(set(config.to_dict()) - {"model_type", "transformers_version", "id2label", "label2id"}):
        value = getattr(config, name, None)
        if isinstance(value, transformers.PretrainedConfig):
            settings[name] = {**small_settings(value), "model_type": value.model_type}
        elif (small := smaller(name.lower(), value)) is not None:
            settings[name] = small
    types = getattr(config, "layer_types", None)
    if isinstance(types, list) and len(types) > 2 and "num_hidden_layers" in settings:
        settings["layer_types"] = [types[0], types[-1]]
    return settings


def without(settings, pattern):
    """The settings less those whose names match, in parts as well."""
    return {
        name: without(value, pattern) if isinstance(value, dict) else value
        for name, value in settings.items()
        if not re.search(pattern, name)
    }


def small_model(name):
    """The model of an architecture and an input that it takes; RuntimeError with the last failure if there is none."""
    default = CONFIG_MAPPING[name]()
    settings, failure = small_settings(default), "no input"
    for attempt in (settings, without(settings, "head_dim"), without(settings, "layer_types|depths|hidden_sizes")):
        try:
            config = type(default)(**attempt)
            if getattr(config, "pad_token_id", None) is None:
                config.pad_token_id = 0
            with torch.device("meta"):
                size = sum(p.numel() for p in transformers.AutoModel.from_config(config).parameters())
            if size > MOST_PARAMETERS:
                raise ValueError(f"{size / 1e6:.0f} million parameters")
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config).float().eval()
            for parameter in model.parameters():
                if parameter.numel() and float(parameter.detach().abs().max()) == 0:
                    torch.nn.init.normal_(parameter, 0, 0.1)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
            continue
        for inputs in possible_inputs(model, config):
            try:
                with torch.no_grad():
                    output = model(**inputs)
                if any(v.shape[:1] == (2,) and v.isfinite().all() for v in floats(output).values()):
                    return model, inputs
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
    raise RuntimeError(failure.splitlines()[0][:150])


def setting(config, *names, default):
    """The first whole number of these names, in the configuration or in its parts."""
    for part in (
        config,
        *(getattr(config, f"{kind}_config", None) for kind in ("text", "vision", "audio", "backbone")),
    ):
        for name in names:
            value = getattr(part, name, None)
            value = value[0] if isinstance(value, (list, tuple)) and value else value
            if isinstance(value, int):
                return value
    return default


def possible_inputs(model, config):
    """Inputs of two rows that a model may take, by the names of its arguments."""
    names = set(inspect.signature(model.forward).parameters)
    source = torch.Generator().manual_seed(3)
    words = torch.randint(3, 60, (2, 8), generator=source)
    image = setting(config, "image_size", "img_size", "input_size", default=32)
    channels = setting(config, "num_channels", "in_channels", default=3)
    mels = setting(config, "num_mel_bins", "feature_size", "input_dim", default=16)
    text = (
        {"input_ids": words, "attention_mask": torch.ones_like(words)}
        if "attention_mask" in names
        else {"input_ids": words}
    )
    decoder = {"decoder_input_ids": words[:, :5].clone()} if "decoder_input_ids" in names else {}
    fixed = {"use_cache": False} if "use_cache" in names else {}
    box = {"bbox": torch.tensor([0, 0, 10, 10]).expand(2, 8, 4).clone()} if "bbox" in names else {}
    pictures = [
        {"pixel_values": torch.randn(2, channels, size, size, generator=source)}
        for size in dict.fromkeys((image, 32, 64))
    ]
    films = [{"pixel_values": torch.randn(2, 4, channels, image, image, generator=source)}]
    sounds = [{"input_values": torch.randn(shape, generator=source)} for shape in ((2, 800), (2, 1, 800), (2, 3200))]
    sounds += [{"input_features": torch.randn(shape, generator=source)} for shape in ((2, 60, mels), (2, mels, 60), (2, mels, 3000))]  # fmt: skip
    candidates = [text | decoder | box] if "input_ids" in names else []
    candidates += [text | picture | box for picture in pictures] if {"input_ids", "pixel_values"} <= names else []
    for other in (*pictures, *films, *sounds):
        if set(other) <= names:
            candidates += [other, other | decoder]
    candidates += [{"inputs": words}] if "inputs" in names else []
    for candidate in candidates:
        yield candidate | fixed


def _plain(value):
    """The value with dicts for mappings: outputs of the oldest transformers have no paths of their own."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def floats(output):
    """The floating-point tensors of an output by their place in it."""
    leaves = torch.utils._pytree.tree_flatten_with_path(_plain(output))[0]
    return {
        torch.utils._pytree.keystr(path): leaf
        for path, leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.dim()
    }
