"""Tokens shaded by their uncertainty: in a notebook, in an HTML page and in a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.text import Text

# Terminal styles, each more prominent than the one before on a black and on a white background.
_LEVELS = ("underline", "#111111 on #c9ae93", "#111111 on #eb9a55", "bold #111111 on #ff6a00")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


@dataclass(frozen=True, repr=False)
class ShadedText:
    """A text whose tokens are shaded by a number each: the darker, the less certain.

    Renders in a notebook; `html()` is a snippet for any page, `print()` is for a terminal. Letters are escaped,
    and characters that would control a terminal or change the direction of writing are shown as �.

    Args:
        tokens: The tokens as text, with the spaces that belong to them.
        values: A number for each, zero or more: an entropy, a mutual information. NaN leaves a token unshaded.
        label: The name of the numbers, for the legend.
        maximum: The number of the darkest shade; by default the largest of `values`. Fix it to compare texts.

    Example:
        >>> print(ShadedText(["Paris", " in", " 1889"], [0.0, 0.01, 0.4], label="mutual information"))
        Paris in [1889: 0.4]
        mutual information from 0 to 0.4; marked from 0.2 on
    """

    tokens: Sequence[str]
    values: Sequence[float]
    label: str = "uncertainty"
    maximum: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.tokens, str) or not all(isinstance(token, str) for token in self.tokens):
            raise TypeError(f"`tokens` must be a sequence of strings; got {self.tokens!r}.")
        object.__setattr__(self, "tokens", tuple(self.tokens))
        object.__setattr__(self, "values", tuple(float(value) for value in self.values))
        n_tokens, values = len(self.tokens), self.values
        if len(values) != n_tokens:
            raise ValueError(f"`values` must have a number for each of the {n_tokens} tokens; got {len(values)}.")
        if any(value < 0 or math.isinf(value) for value in values):
            raise ValueError(f"`values` must be finite and zero or more; got {min(values)!r} to {max(values)!r}.")
        if self.maximum is not None and not 0 < self.maximum < math.inf:
            raise ValueError(f"`maximum` must be a positive number; got {self.maximum!r}.")

    @property
    def scale(self) -> float:
        """The number of the darkest shade."""
        if self.maximum is not None:
            return self.maximum
        return max((value for value in self.values if not math.isnan(value)), default=0.0)

    def shares(self) -> list[float]:
        """The shade of each token, from 0 to 1."""
        scale = self.scale
        return [0.0 if math.isnan(v) or scale == 0 else min(v / scale, 1.0) for v in self.values]

    def html(self) -> str:
        """A snippet for an HTML page, light or dark: no script, and inline styles only."""
        spans = []
        for token, value, share in zip(self.tokens, self.values, self.shares(), strict=True):
            shade = f"background:{_colour(share)};border-radius:.2em;" if share >= 0.005 else ""
            title = "" if math.isnan(value) else f' title="{escape(self.label)} {value:.3g}"'
            space, word = _parts(token)
            spans.append(f'{escape(space)}<span style="{shade}padding:.1em 0"{title}>{escape(word)}</span>')
        bar = f"background:linear-gradient(to right,{_colour(0)},{_colour(1)});border:1px solid rgba(128,128,128,.5)"
        box = "display:inline-block;width:7em;height:.8em;vertical-align:-.1em"
        return (
            '<div style="line-height:1.9"><div style="white-space:pre-wrap;overflow-wrap:anywhere">'
            f"{''.join(spans)}</div>"
            '<div style="font-size:.8em;margin-top:.4em">'
            f'{escape(self.label)} 0 <span style="{bar};{box}"></span> {self.scale:.3g}</div></div>'
        )

    _repr_html_ = html

    def __rich__(self) -> Text:
        """For `rich.print`: the text with shaded tokens."""
        from rich.text import Text

        text = Text()
        for token, share in zip(self.tokens, self.shares(), strict=True):
            level = math.ceil(share * len(_LEVELS) - 0.5)
            space, word = _parts(token)
            text.append(space).append(word, style=_LEVELS[level - 1] if level > 0 else "")
        text.append(f"\n{_visible(self.label)} 0 ", style="dim")
        for style in _LEVELS:
            text.append("   ", style=style)
        return text.append(f" {self.scale:.3g}", style="dim")

    def print(self, **options: Any) -> None:
        """Prints the text to a terminal, in colour where it is supported, with options of `rich.console.Console`."""
        from rich.console import Console

        console = Console(highlight=False, **options)
        console.print(self if console.color_system else _visible(str(self)), markup=False, soft_wrap=True)

    def __str__(self) -> str:
        """The text with the less certain half of the scale in brackets, each with its number."""
        half, words = self.scale / 2, []
        for token, value in zip(self.tokens, self.values, strict=True):
            space, word = _parts(token)
            words.append(f"{space}[{word}: {value:.2g}]" if value >= half > 0 and word.strip() else space + word)
        return f"{''.join(words)}\n{_visible(self.label)} from 0 to {self.scale:.3g}; marked from {half:.3g} on"

    def __repr__(self) -> str:
        return f"ShadedText({len(self.tokens)} tokens, {self.label} up to {self.scale:.3g})"


def _colour(share: float) -> str:
    return f"rgba(224,108,31,{0.6 * share:.3f})"  # at most so opaque: letters stay readable on light and dark pages


def _parts(token: str) -> tuple[str, str]:
    """The spaces that a token begins with, which stay unshaded, and the rest."""
    shown = _visible(token)
    word = shown.lstrip() or shown
    return shown.removesuffix(word), word


def _visible(text: str) -> str:
    return _CONTROL.sub("\ufffd", text)
