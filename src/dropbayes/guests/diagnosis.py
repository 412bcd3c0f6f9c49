"""What would be sampled in a network, what would not and why, and what its own switches would have done instead."""

import contextlib
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._pytree import PyTree

from dropbayes.runtime.formatting import Printed, Table, count
from dropbayes.sampling import ProbeFailed, Prober, Sampling, Site, as_inputs, check_sampling, inspect
from dropbayes.tracing import SharedWrite
from dropbayes.tracing.generators import names_generators
from dropbayes.tracing.views import checked_network


@dataclass(frozen=True)
class Finding:
    """One place of a network that is random, could be, or must not be switched with what is."""

    path: str  #: The name of the module.
    kind: str  #: The operation, or the class of a module that does not draw.
    drop_prob: float | None  #: The drop probability, if it is known.
    shape: str  #: The shape of one row's mask.
    rows: str  #: The axis of a batch's rows in the mask.
    before: str  #: The weight layer that reads the dropped tensor.
    flag: str  #: The mode of the module as it is now.
    in_eval: str  #: What it does after `model.eval()`, the mode in which frameworks predict.
    in_train: str  #: What it does after `model.train()`.
    here: str  #: What `predict` does with it.


@dataclass(frozen=True)
class Diagnosis(Printed):
    """The findings in a network, and what follows from them; prints as a table."""

    findings: tuple[Finding, ...]
    notes: tuple[str, ...]

    def table(self) -> Table:
        """The findings, one in each line."""
        head = ("path", "kind", "drop_prob", "mask", "rows", "before", "flag", "in eval()", "in train()", "predict")
        body = [tuple("-" if cell is None else str(cell) for cell in vars(one).values()) for one in self.findings]
        return Table("", body, head, notes=list(self.notes), rule=True)


def doctor(net: nn.Module, x: PyTree, *, sampling: Sampling = Sampling()) -> Diagnosis:
    """What `predict` would sample in a network, what it would not and why, and what other ways would have done.

    A network that `predict` refuses is described, too, with the reason; none is changed. The input is one batch, as in
    `predict`, and `sampling` has the axis of its rows and the modules to ignore.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1)).eval()
        >>> print(doctor(net, torch.zeros(5, 2)))
        path  kind         drop_prob  mask  rows    before  flag  in eval()  in train()            predict
        ----  -----------  ---------  ----  ------  ------  ----  ---------  --------------------  -------
        2     dropout      0.1        1x8   axis 0  3       eval  off        draws                 sampled
        1     BatchNorm1d  -          -     -       -       eval  fixed      moves its statistics  fixed
        1 of 1 site sampled
        after eval(), in which frameworks predict, no site draws: the variance would be 0
        after train(), 1 would use the statistics of the batch and overwrite its own
    """
    check_sampling(sampling)
    plain, inputs = checked_network(net), as_inputs(x, net, row_axis=sampling.row_axis)
    sites: tuple[Site, ...] = ()
    notes: list[str] = []
    try:
        profile = inspect(plain, inputs, sampling.ignored).profile
        sites = profile.sites + profile.left_out
        profile.check_random()
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        notes.append(f"refused: {error}")
    always: set[str] = set()  # the sites that draw in evaluation mode, too
    with torch.inference_mode(False), torch.no_grad(), contextlib.suppress(ProbeFailed, SharedWrite, ValueError):
        prober = Prober(plain, inputs, sampling.ignored, names_generators(plain))
        always = {site.name for site in prober(inputs.different_rows().leaves, None).recorder.sites}
    modules = dict(plain.named_modules())
    findings = [_of_site(site, modules.get(site.path, plain), site.name in always) for site in sites]
    drawing = {site.path for site in sites}
    for name, module in modules.items():
        # The looks of dropout without a site: by its class, or by a rate that is not 0.
        rate = getattr(module, "dropout", None)
        looks = "drop" in type(module).__name__.lower() or (type(rate) is float and rate > 0)
        if looks and name not in drawing:
            why = "drop_prob is 0" if getattr(module, "p", None) == 0 else "not met by this input"
            findings.append(_of_module(name, module, "off", "-", f"not: {why}"))
    norms = {name: m for name, m in modules.items() if getattr(m, "track_running_stats", False)}
    findings += [_of_module(name, m, "fixed", "moves its statistics", "fixed") for name, m in norms.items()]
    sampled = sum(finding.here == "sampled" for finding in findings)
    notes.insert(0, f"{sampled} of {count(len(sites), 'site')} sampled")
    if sampled and not always:
        notes.append("after eval(), in which frameworks predict, no site draws: the variance would be 0")
    if norms:
        notes.append(f"after train(), {', '.join(norms)} would use the statistics of the batch and overwrite its own")
    return Diagnosis(tuple(findings), tuple(notes))


def _of_site(site: Site, module: nn.Module, always: bool) -> Finding:
    here = "not: ignored" if site.left_out else "sampled" if site.is_random else f"not: drop_prob is {site.drop_prob}"
    shape = "x".join(map(str, site.shape)) or "scalar"
    rows = "none" if site.layout is None else f"axis {site.layout.axis}"
    place = site.path or "(network)", site.kind, site.drop_prob, shape, rows, site.before or "no weight"
    return Finding(*place, _flag(module), "draws" if always else "off", "draws", here)


def _of_module(name: str, module: nn.Module, in_eval: str, in_train: str, here: str) -> Finding:
    kind = type(module).__name__
    return Finding(name, kind, getattr(module, "p", None), "-", "-", "-", _flag(module), in_eval, in_train, here)


def _flag(module: nn.Module) -> str:
    return "train" if module.training else "eval"
