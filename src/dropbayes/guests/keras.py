"""Keras 3 on torch: dropout switched apart from normalisation, which Keras' argument `training` switches as well."""

import functools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class KerasNetwork(nn.Module):
    """A Keras model, which is not changed, as a network whose random layers follow torch's training flags."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"`model` must run on torch, unlike this {type(model).__name__}: set KERAS_BACKEND=torch.")
        found: Any = model._flatten_layers
        self._held: Any = (model, *(layer for layer in found() if hasattr(layer, "seed_generator")))  # no submodules
        for layer in self._held[1:]:  # a switch for each, of its class and name
            kind = type(type(layer).__name__, (_Switch,), {"__module__": type(layer).__module__})
            self.add_module(f"{layer.name.replace('.', '_')}_{len(self._modules)}", kind())

    def forward(self, inputs: Any) -> Any:
        """The model's output; each random layer draws if its switch is in training mode."""
        from keras import random

        # What an unseeded layer has for a source of seeds, without the state that a draw would move.
        contents = {"__init__": lambda _: None, "_initial_seed": None, "next": lambda *_, **__: torch.zeros(2).long()}
        unseeded = type("Unseeded", (random.SeedGenerator,), contents)()
        model, *layers = self._held
        seeds = [layer.seed_generator for layer in layers]
        for layer, switch in zip(layers, self.children(), strict=True):
            layer.__dict__.update(call=functools.partial(switch, layer), seed_generator=unseeded)
        try:
            with _TorchsGenerator():
                return model(inputs)
        finally:
            for layer, seed_generator in zip(layers, seeds, strict=True):
                layer.__dict__.update(seed_generator=seed_generator)
                del layer.__dict__["call"]


class _Switch(nn.Module):
    def forward(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        return type(layer).call(layer, *args, **kwargs | {"training": self.training})


class _TorchsGenerator(TorchFunctionMode):
    """Keras' random numbers from torch's own generator, which the engine keys; raw masks as the uniforms they are."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.bernoulli:
            return (torch.rand(args[0].shape, device=args[0].device) < args[0]).to(args[0])
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "generator"})
