"""The training flags of a draw: those that switch randomness on and nothing else.

With every flag set except those of normalisation, and every mask left out, the output must be that of evaluation mode.
Where it is not, one class of modules at a time shows which ones only drop; the others stay in evaluation mode.
"""

import contextlib
import warnings
from collections import Counter

from torch import nn

from dropbayes.sampling.inputs import Inputs, cloned_leaves
from dropbayes.sampling.probes import Probe, ProbeFailed, Prober, is_ignored, training_flags
from dropbayes.tracing import NEUTRAL, Interception, Neutral
from dropbayes.tracing.generators import SETTERS, UNSEEDED, Advancing, keyed_generators
from dropbayes.tracing.views import Flags, View, eagerly


class UncertaintyWarning(UserWarning):
    """An uncertainty that is suspiciously small."""


def training_probe(prober: Prober, rows: Inputs, plain: Probe) -> tuple[Probe, Flags]:
    """The probe with the training flags of classes that only drop, and these flags."""
    flags, full = training_flags(prober.ignored), None
    try:
        full = prober(rows.leaves, flags)
    except ProbeFailed as failed:  # a training branch may need targets or a process group
        if isinstance(failed.error, NotImplementedError):
            raise failed.error from None
    if full is not None:
        check_accounted(full, plain)
        moves = full.host.moved and not plain.host.moved
        if full.stands_for(plain) or (full.fits(plain) and (moves or _agree_in_double(prober, rows, flags))):
            return full, flags
        check_repeatable(prober, rows, flags, full)
        if full.fits(plain) and _is_neutral(prober, rows, flags, full):
            return full, flags
    classes = sorted({type(m) for n, m in prober.net.named_modules() if flags(n, m)}, key=lambda cls: cls.__name__)
    # Those of torch do no more, though they may be met in a branch alone that no random number here has taken.
    homes = [f"torch.nn.modules.{name}" for name in ("activation", "dropout", "rnn")]
    known = {cls for cls in classes if cls.__module__ in homes}
    dropping = known.union(cls for cls in classes if cls not in known and _only_drops(prober, rows, cls, plain))
    flags = training_flags(prober.ignored, in_evaluation=frozenset(classes) - dropping)
    chosen = prober(rows.leaves, flags) if dropping else plain
    if not chosen.fits(plain):
        raise ValueError(f"`net` gives an output of another form in training: {_describe(chosen)}.")
    pairs = [(full or chosen, chosen)]
    with contextlib.suppress(ProbeFailed):  # a coin may lead to further sites
        pairs += [
            (prober(rows.leaves, training_flags(prober.ignored), one), prober(rows.leaves, flags, one))
            for one in NEUTRAL[2:4]
        ]
    missing = [name for both in pairs for name in _missing(*both)]
    if missing := missing + [name for name in pairs[0][0].host.moved if name not in chosen.host.moved]:
        rule = f"draws in training what cannot be switched on alone: {missing[0]}"
        remedy = "Name the module in Sampling(ignore_modules=...), or let its output differ by dropout only"
        raise ValueError(f"`net` {rule}. Its training branch changes more than dropout. {remedy}.")
    return chosen, flags


def _missing(full: Probe, chosen: Probe) -> list[str]:
    """The sites of one probe that another has not met, in words."""
    every, some = (Counter((site.path, site.kind) for site in probe.recorder.sites) for probe in (full, chosen))
    return [f"{kind} in {path or 'the network'}" for path, kind in every - some]


def _is_neutral(prober: Prober, rows: Inputs, flags: Flags, full: Probe) -> bool:
    """Whether random numbers of which a network makes its own noise have values that leave out that noise alone."""
    if not any(site.kind in ("rand", "randn", "bernoulli") for site in full.recorder.sites):
        return False
    for neutral in NEUTRAL[1:]:
        with contextlib.suppress(ProbeFailed):
            seen, plain = prober(rows.leaves, flags, neutral), prober(rows.leaves, None, neutral)
            nearly = seen.agrees_with(plain, offsets=False)  # rows that are nearly alike differ by their rounding
            if seen.agrees_with(plain) or (nearly and _agree_in_double(prober, rows, flags, neutral)):
                return True
    return False


def _chooses(prober: Prober, rows: Inputs, flags: Flags) -> bool:
    """Whether random numbers are an index or a permutation, which no value leaves out."""
    try:
        return prober(rows.leaves, flags, NEUTRAL[1]).recorder.has_choices
    except ProbeFailed as failed:
        return failed.recorder.has_choices


def _agree_in_double(prober: Prober, rows: Inputs, flags: Flags, neutral: Neutral = NEUTRAL[0]) -> bool:
    return prober.in_double(
        rows, lambda exact, same: exact(same.leaves, flags, neutral).stands_for(exact(same.leaves, None, neutral))
    )


def check_repeatable(prober: Prober, rows: Inputs, flags: Flags, full: Probe) -> None:
    """Raises if more probes give other outputs: with all masks left out, nothing should be random."""
    try:
        n_probes = 20 if prober.named & UNSEEDED else 3  # a coin of the system may fall on one side a few times
        again = [prober(rows.leaves, flags) for _ in range(n_probes)]
    except ProbeFailed:
        return
    if not all(probe.agrees_with(full) for probe in again) and not full.host.moved:
        raise NotImplementedError(
            "`net` gives different outputs in training with every mask left out: it draws random numbers that cannot "
            "be keyed to a seed, from a generator of its own. Draw them with torch.rand, torch.randn or "
            "torch.bernoulli, or name the module in Sampling(ignore_modules=...) if it is not dropout."
        )


def check_masks_differ(prober: Prober, rows: Inputs, flags: Flags) -> None:
    """Raises if torch's generator is set to a state from which a mask was drawn: at another site, or in every pass."""
    states = list[bytes]()
    for seed in (1, 2) if prober.named & SETTERS else ():
        view = View(prober.net, flags, own_parameters=True)
        with keyed_generators(seed), Interception(source := Advancing()):
            eagerly(rows.call)(view.net, cloned_leaves(rows.leaves))
        states += source.states
    if len({*states}) < len(states):
        raise NotImplementedError(
            "`net` sets torch's generator in its forward pass, to a state from which it draws again: two masks are "
            "one, or a mask is the same in every draw. Draw a mask once and use it twice; draw what is fixed from a "
            "torch.Generator of its own."
        )


def _only_drops(prober: Prober, rows: Inputs, cls: type, plain: Probe) -> bool:
    """Whether the training flag of one class enables randomness and nothing else; raises if it does both."""

    def flags(name: str, module: nn.Module) -> bool:
        return type(module) is cls and not is_ignored(prober.ignored, name, module)

    try:
        seen = prober(rows.leaves, flags)
    except ProbeFailed as failed:
        draws = len(failed.recorder.sites) > len(plain.recorder.sites)
        if draws or isinstance(failed.error, NotImplementedError):
            raise failed.error from None
        what = f"the {cls.__name__} of the network stays in evaluation mode, since its training branch fails ({failed})"
        remedy = f"Name it in Sampling(ignore_modules={cls.__name__!r}) if it holds no dropout"
        warnings.warn(f"{what}. {remedy}.", UncertaintyWarning, stacklevel=2)
        return False
    new = seen.recorder.sites[len(plain.recorder.sites) :] or (seen.host.moved and not plain.host.moved)
    if not new and not _switches_noise(prober, rows, flags, plain):
        return False
    only_noise = seen.fits(plain) and (
        bool(seen.host.moved)
        or _is_neutral(prober, rows, flags, seen)
        or _agree_in_double(prober, rows, flags)
        or _chooses(prober, rows, flags)
    )
    if seen.agrees_with(plain) or only_noise:
        return True
    raise ValueError(
        f"`net` holds a {cls.__name__} whose training branch draws ({_describe(seen)}) and changes its output in "
        f"another way as well, so that its randomness alone cannot be switched on. Leave it out with "
        f"Sampling(ignore_modules={cls.__name__!r}) if it is not dropout, or let its output differ by dropout only."
    )


def _switches_noise(prober: Prober, rows: Inputs, flags: Flags, plain: Probe) -> bool:
    """Whether random numbers that are drawn in evaluation mode, too, change the output with these flags alone."""
    if not (plain.recorder.sites or plain.host.moved):
        return False

    def varies(flags: Flags | None) -> bool:
        seen = []
        for seed in range(4):
            noise = Neutral((seed + 0.5) / 4, float(seed % 2), spread=True)
            with keyed_generators(seed) if plain.host.moved else contextlib.nullcontext():
                seen.append(prober(rows.leaves, flags, noise))
        return not all(map(seen[0].agrees_with, seen))

    return varies(flags) and not varies(None)


def _describe(seen: Probe) -> str:
    site = seen.recorder.sites[-1] if seen.recorder.sites else None
    return ", ".join(seen.host.moved) or (f"{site.kind} in {site.path or 'the network'}" if site else "nothing")


def check_accounted(chosen: Probe, plain: Probe) -> None:
    if chosen.unaccounted:
        raise NotImplementedError(
            f"`net` draws random numbers that cannot be keyed to a seed: {chosen.unaccounted[0]}. Draw them with "
            "torch.rand, torch.randn or torch.bernoulli in the thread of the forward pass, or leave the module out by "
            "name with Sampling(ignore_modules=...) if it is not dropout."
        )
    if chosen.recorder.generators[: len(plain.recorder.generators)] != plain.recorder.generators:
        rule = "draws from its own torch.Generator, whose state continues between calls: `seed` cannot control it"
        raise NotImplementedError(f"`net` {rule}. Seed it in the forward pass, or draw from torch's own generator.")
