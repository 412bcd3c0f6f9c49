"""Draws of a language model in one batch, against one generation for each draw: python -m benchmarks.generation

A model of six layers, 256 wide, generates 64 tokens under the mean of eight draws, on the CPU. It is compared with eight
calls of the model's own `generate`, which is what one text for each of eight models would cost, and with the same draws
one at a time. Each figure is the CPU time of one thread, the smallest of a few turns, taken in turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import dropbayes as db
from benchmarks import history

N_DRAWS, NEW_TOKENS, TURNS = 8, 64, 4


def models() -> dict[str, Any]:
    """A model with dropout everywhere, and one with dropout in its last two blocks alone."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 8192, "n_embd": 256, "n_layer": 6, "n_head": 8, "n_positions": 256}
    ends = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
    everywhere = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends)).eval()
    last = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, embd_pdrop=0.0)).eval()
    for block in last.transformer.h[:-2]:
        block.attn.attn_dropout.p = block.attn.resid_dropout.p = block.mlp.dropout.p = 0.0
    return {"every block": everywhere, "last two blocks": last}


def ways(model: Any, prompt: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """The ways of making the texts."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    mask = torch.ones_like(prompt)

    def one_by_one() -> None:
        for _ in range(N_DRAWS):
            model.generate(input_ids=prompt, attention_mask=mask, **options)

    return {
        "generations": one_by_one,
        "one batch": lambda: db.language.generate(model, prompt, n_draws=N_DRAWS, **options),
        "draw by draw": lambda: db.language.generate(model, prompt, n_draws=N_DRAWS, draws_at_once=1, **options),
    }


def measured(model: Any) -> dict[str, float]:
    """The seconds of each way, and the memory of the caches."""
    prompt = torch.randint(1, 8192, (1, 32), generator=torch.Generator().manual_seed(1))
    calls = ways(model, prompt)
    result = calls["one batch"]()
    seconds = dict.fromkeys(calls, float("inf"))
    for turn in range(TURNS):
        for name, call in calls.items():
            if name == "draw by draw" and turn != 1:
                continue
            start = time.process_time()
            call()
            if turn:  # the first turn inspects the model and warms the caches of the processor
                seconds[name] = min(seconds[name], time.process_time() - start)
    return {**seconds, "cache_bytes": result.cache_bytes}


def main() -> None:
    torch.set_num_threads(1)
    figures = {name: measured(model) for name, model in models().items()}
    goals = []
    print(
        "| dropout in | 8 generations | 8 draws, one batch | ratio | draw by draw | caches |\n|---|---|---|---|---|---|"
    )
    for name, row in figures.items():
        row["ratio"] = row["generations"] / row["one batch"]
        print(
            f"| {name} | {row['generations']:.2f} s | {row['one batch']:.2f} s | {row['ratio']:.1f} | "
            f"{row['draw by draw']:.2f} s | {row['cache_bytes'] / 2**20:.1f} MiB |"
        )
        goals.append(history.Goal(f"{name}: times eight generations", row["ratio"], at_least=2.5))
    history.write("generation", {"draws": N_DRAWS, "new_tokens": NEW_TOKENS, "figures": figures}, goals)


if __name__ == "__main__":
    main()
