"""The networks of the GPU benchmark: those people use, and some that no one tuned for.

A network is made with random weights; torchvision and transformers are needed only for their own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Split = Callable[[Any], tuple[nn.Module, nn.Module]]


@dataclass(frozen=True)
class Case:
    """A network with its input.

    Args:
        make: Makes the network.
        inputs: Makes the input of a number of rows, on the CPU.
        rows: The number of rows.
        draws: The number of draws.
        split: Cuts the network into what precedes its first dropout and the rest, where that is easy to write down.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    rows: int
    draws: int
    split: Split | None = None


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randn(rows, *shape)


def tokens(length: int, vocabulary: int) -> Callable[[int], Tensor]:
    return lambda rows: torch.randint(0, vocabulary, (rows, length))


# Networks people use --------------------------------------------------------------------------------------------------


def perceptron(*widths: int, drop_prob: float, at_input: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Dropout(drop_prob)] if at_input else []
    for before, after in itertools.pairwise(widths[:-1]):
        layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout(drop_prob)]
    return nn.Sequential(*layers, nn.Linear(*widths[-2:]))


def of_torchvision(name: str, **settings: Any) -> nn.Module:
    import torchvision

    models = torchvision.models.segmentation if name.startswith("fcn") else torchvision.models
    if name.startswith("fcn"):
        settings["weights_backbone"] = None
    return getattr(models, name)(weights=None, **settings)


class Segmentation(nn.Module):
    """A torchvision segmentation network as a function to its main output."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)["out"]


def vgg_split(net: Any) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(net.features, net.avgpool, nn.Flatten(), net.classifier[:2]), net.classifier[2:]


class Backbone(nn.Module):
    """A segmentation network up to the dropout of its head."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.backbone, self.head = net.backbone, nn.Sequential(*list(net.classifier)[:3])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)["out"])


def fcn_split(segmentation: Any) -> tuple[nn.Module, nn.Module]:
    net = segmentation.net
    return Backbone(net), nn.Sequential(*list(net.classifier)[3:], nn.Upsample((256, 256), mode="bilinear"))


class Step(nn.Sequential):
    """Two convolutions and a dropout of channels."""

    def __init__(self, before: int, after: int, drop_prob: float) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.Conv2d(after, after, 3, padding=1), nn.ReLU(),
            nn.Dropout2d(drop_prob),
        )  # fmt: skip


class WideBlock(nn.Module):
    """A residual block with dropout between its convolutions (Zagoruyko and Komodakis 2016)."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(before), nn.ReLU(), nn.Conv2d(before, after, 3, padding=1))
        self.drop = nn.Dropout(0.3)
        self.second = nn.Sequential(nn.BatchNorm2d(after), nn.ReLU(), nn.Conv2d(after, after, 3, stride, padding=1))
        self.past = nn.Identity() if before == after else nn.Conv2d(before, after, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.drop(self.first(x))) + self.past(x)


def wide_resnet(depth: int = 4) -> nn.Module:
    """Ten times wider than the first residual networks, on small images; channels last in memory, as GPUs prefer."""
    widths = [16, 160, 320, 640]
    groups = [(a, b, 1 if i == 0 else 2) for i, (a, b) in enumerate(itertools.pairwise(widths))]
    blocks = [
        WideBlock(*group) if k == 0 else WideBlock(group[1], group[1], 1) for group in groups for k in range(depth)
    ]
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(640, 10)
    )
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class UNet(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4, drop_prob: float = 0.1) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(depth)]
        self.down = nn.ModuleList([Step(a, b, drop_prob) for a, b in zip([3, *widths[:-1]], widths, strict=True)])
        upward = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.rise = nn.ModuleList([nn.ConvTranspose2d(a, b, 2, 2) for a, b in upward])
        self.up = nn.ModuleList([Step(2 * b, b, drop_prob) for _, b in upward])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed = []
        for level, step in enumerate(self.down):
            x = step(x if level == 0 else nn.functional.max_pool2d(x, 2))
            passed.append(x)
        for rise, step, skip in zip(self.rise, self.up, passed[-2::-1], strict=True):
            x = step(torch.cat([rise(x), skip], 1))
        return self.head(x)


class Output(nn.Module):
    """A Hugging Face model as a function from one tensor to one of its outputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, x: Tensor) -> Tensor:
        result = getattr(self.model(x), self.name)
        return result[:, -1] if self.name == "last_hidden_state" else result


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    return Output(BertForSequenceClassification(BertConfig()), "logits")


def deberta() -> nn.Module:
    from transformers import DebertaV2Config, DebertaV2ForSequenceClassification

    config = DebertaV2Config(
        vocab_size=30_000, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=3072,
        relative_attention=True, pos_att_type=["p2c", "c2p"],
    )  # fmt: skip
    return Output(DebertaV2ForSequenceClassification(config), "logits")


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    return Output(GPT2Model(GPT2Config()), "last_hidden_state")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], width: int) -> None:
        super().__init__()
        self.recurrent, self.head = kind(64, width, 2, dropout=0.3, batch_first=True), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(x)[0][:, -1])


# Networks of no fame --------------------------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    """Tokens mixed with each other, then features."""

    def __init__(self, n_tokens: int, width: int, drop_prob: float) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.across, self.within = (
            nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Dropout(drop_prob), nn.Linear(2 * n, n), nn.Dropout(drop_prob))
            for n in (n_tokens, width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norms[1](x))


class Mixer(nn.Module):
    def __init__(self, depth: int = 8, width: int = 256) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.blocks = nn.Sequential(*[MixerBlock(196, width, 0.1) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class Translator(nn.Module):
    """A GRU encoder whose last state starts a GRU decoder that feeds its own outputs back."""

    def __init__(self, width: int = 256, horizon: int = 12) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(8, width, 2, dropout=0.2, batch_first=True), nn.GRUCell(8, width)
        self.drop, self.head, self.horizon = nn.Dropout(0.2), nn.Linear(width, 8), horizon

    def forward(self, x: Tensor) -> Tensor:
        state, step, steps = self.encoder(x)[1][-1], x[:, -1], []
        for _ in range(self.horizon):
            state = self.decoder(step, state)
            step = self.head(self.drop(state))
            steps.append(step)
        return torch.stack(steps, 1)


class Waves(nn.Module):
    """Dilated one-dimensional convolutions with residuals and whole channels dropped."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.first, self.head = nn.Conv1d(1, width, 1), nn.Linear(width, 5)
        self.convolutions = nn.ModuleList(
            [nn.Conv1d(width, width, 3, padding=2**level, dilation=2**level) for level in range(depth)]
        )
        self.drop = nn.Dropout1d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for convolution in self.convolutions:
            h = h + self.drop(torch.tanh(convolution(h)))
        return self.head(h.mean(-1))


class Experts(nn.Module):
    """Every row's two best of eight experts, weighted by a gate."""

    def __init__(self, width: int = 256, n_experts: int = 8) -> None:
        super().__init__()
        self.first, self.gate, self.head = nn.Linear(32, width), nn.Linear(width, n_experts), nn.Linear(width, 3)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Dropout(0.2)) for _ in range(n_experts)]
        )

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        scores, chosen = self.gate(h).topk(2, -1)
        outputs = torch.stack([expert(h) for expert in self.experts], -2)
        picked = outputs.gather(-2, chosen[..., None].expand(*chosen.shape, h.shape[-1]))
        return self.head((picked * scores.softmax(-1)[..., None]).sum(-2))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.BatchNorm1d(width), nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return x + self.branch(x)


def residual_perceptron(width: int = 192, depth: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(20, width), *[ResidualBlock(width) for _ in range(depth)], nn.ReLU(), nn.Linear(width, 1))  # fmt: skip


def wav2vec() -> nn.Module:
    from transformers import Wav2Vec2Config, Wav2Vec2ForSequenceClassification

    config = Wav2Vec2Config(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, layerdrop=0.0,
        apply_spec_augment=False,
    )  # fmt: skip
    return Output(Wav2Vec2ForSequenceClassification(config), "logits")


CASES: dict[str, Case] = {
    "MLP 13-50-1, N=1": Case(lambda: perceptron(13, 50, 1, drop_prob=0.1, at_input=True), normal(13), 1, 100),
    "MLP 13-50-1, N=1,000": Case(lambda: perceptron(13, 50, 1, drop_prob=0.1, at_input=True), normal(13), 1000, 100),
    "MLP 13-50-1, N=100,000": Case(lambda: perceptron(13, 50, 1, drop_prob=0.1, at_input=True), normal(13), 100_000, 100),
    "MLP 2-1024x5-1, p=.1": Case(lambda: perceptron(2, *[1024] * 5, 1, drop_prob=0.1), normal(2), 400, 100),
    "MLP 2-1024x5-1, p=.5": Case(lambda: perceptron(2, *[1024] * 5, 1, drop_prob=0.5), normal(2), 400, 100),
    "vgg16": Case(lambda: of_torchvision("vgg16"), normal(3, 224, 224), 16, 50, vgg_split),
    "densenet121": Case(lambda: of_torchvision("densenet121", drop_rate=0.2), normal(3, 224, 224), 8, 32),
    "efficientnet_b0": Case(lambda: of_torchvision("efficientnet_b0"), normal(3, 224, 224), 16, 32),
    "efficientnet_v2_s": Case(lambda: of_torchvision("efficientnet_v2_s"), normal(3, 224, 224), 8, 16),
    "maxvit_t": Case(lambda: of_torchvision("maxvit_t"), normal(3, 224, 224), 4, 16),
    "swin_t": Case(lambda: of_torchvision("swin_t", dropout=0.1, attention_dropout=0.1), normal(3, 224, 224), 8, 16),
    "vit_b_16": Case(
        lambda: of_torchvision("vit_b_16", dropout=0.1, attention_dropout=0.1), normal(3, 224, 224), 8, 32
    ),
    "fcn_resnet50": Case(lambda: Segmentation(of_torchvision("fcn_resnet50")), normal(3, 256, 256), 4, 32, fcn_split),
    "wide ResNet 28-10, channels last": Case(wide_resnet, normal(3, 32, 32), 16, 32),
    "U-Net": Case(UNet, normal(3, 256, 256), 4, 32),
    "BERT base": Case(bert, tokens(128, 30_000), 16, 32),
    "BERT base, one row": Case(bert, tokens(128, 30_000), 1, 32),
    "DeBERTa": Case(deberta, tokens(128, 30_000), 8, 32),
    "GPT-2": Case(gpt2, tokens(128, 50_000), 8, 32),
    "LSTM 2x512": Case(lambda: Recurrent(nn.LSTM, 512), normal(100, 64), 32, 50),
    "mixer": Case(Mixer, normal(3, 224, 224), 8, 32),
    "GRU encoder-decoder": Case(Translator, normal(48, 8), 32, 50),
    "1-d convolutions": Case(Waves, normal(1, 1024), 16, 50),
    "experts": Case(Experts, normal(32), 256, 50),
    "residual MLP": Case(residual_perceptron, normal(20), 1000, 50),
    "wav2vec2": Case(wav2vec, normal(8000), 4, 32),
}  # fmt: skip
