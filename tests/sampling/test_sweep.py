"""Every architecture of the installed transformers that can be built small: draws against a loop in training mode.

Each runs in a process of its own with a bound on its processor time. What cannot be built or fed here is counted apart.
"""

import collections
import copy
import json
import multiprocessing
import resource
import signal
import traceback
import warnings

import pytest
import torch

import dropbayes as db

transformers = pytest.importorskip("transformers")

N_DRAWS = 60
SECONDS = 40
N_PARTS = 12  # of the architectures, each a few minutes long


def state(model):
    """What a draw must leave alone: parameters, buffers, flags and torch's generator."""
    tensors = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    return tensors, [module.training for module in model.modules()], torch.get_rng_state()


def same(before, after):
    tensors = all(torch.equal(a.nan_to_num(), after[0][name].nan_to_num()) for name, a in before[0].items())
    return tensors and before[1] == after[1] and torch.equal(before[2], after[2])


def looped(model, inputs):
    """Draws by the usual recipe: training mode but for normalisation, pass after pass."""
    from tests.sampling.architectures import floats

    twin = copy.deepcopy(model).train()
    for module in twin.modules():
        if "BatchNorm" in type(module).__name__:
            module.eval()
    torch.manual_seed(11)
    with torch.no_grad():
        passes = [floats(twin(**inputs)) for _ in range(N_DRAWS)]
    places = [place for place, value in passes[0].items() if all(p[place].shape == value.shape for p in passes)]
    return {place: torch.stack([p[place] for p in passes]).double() for place in places}


def disagreement(ours, loop):
    """What is wrong with the moments of our draws beside those of the loop; empty if nothing is."""
    mean, variance, total = loop.mean(0), loop.var(0), float(loop.var(0).sum())
    scale = float(mean.square().sum()) + 1e-30
    if ours.shape != loop.shape:
        return f"shape {tuple(ours.shape)} and {tuple(loop.shape)}"
    if total < 1e-10 * scale:
        return "" if float(ours.var(0).sum()) < 1e-7 * scale else "random where the loop is not"
    error = (ours.mean(0) - mean) / ((variance + ours.var(0)) / N_DRAWS + 1e-10 * scale / mean.numel()).sqrt()
    ratio = float(ours.var(0).sum()) / total
    parts = torch.stack([part.var(0).sum() for part in loop.chunk(6)])
    noise = float(parts.std() / parts.mean()) / 6**0.5
    wrong = (
        [f"means apart by {float(error.square().mean().sqrt()):.1f} standard errors"]
        if error.square().mean() > 4
        else []
    )
    wrong += [f"variances in the ratio {ratio:.2f}"] if not 0.7 < ratio < 1.4 and abs(ratio - 1) > 6 * noise else []
    return ", ".join(wrong)


def judged(name):
    """The verdict on one architecture and its reason."""
    from tests.sampling.architectures import floats, small_model

    try:
        model, inputs = small_model(name)
        loop = looped(model, inputs)
    except Exception as error:
        return "unbuilt", str(error)[:150]
    before = state(model)
    try:
        drawn = floats(
            db.draws(model, inputs, n_draws=N_DRAWS, masks="row", sampling=db.Sampling(sampler="independent"))
        )
    except (ValueError, TypeError, NotImplementedError) as error:  # what cannot be keyed or rows that depend
        kind = "none" if "must have dropout" in str(error) else "refused"
        return (kind, str(error)[:150]) if same(before, state(model)) else ("changed", "after a refusal")
    if not same(before, state(model)):
        return "changed", "by draws"
    places = [place for place in loop if place in drawn]
    wrong = [f"{place}: {found}" for place in places if (found := disagreement(drawn[place].double(), loop[place]))]
    return ("wrong", "; ".join(wrong)[:300]) if wrong or not places else ("right", "")


def answer(name, connection):
    """Runs in a process of its own: sends the verdict."""
    torch.set_num_threads(1)  # the threads of the process it was forked from are gone, and waiting for them never ends
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 5))
    signal.signal(signal.SIGXCPU, lambda *_: (_ for _ in ()).throw(TimeoutError()))
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        connection.send(judged(name))
    except TimeoutError:
        connection.send(("late", f"more than {SECONDS} s"))
    except BaseException:
        connection.send(("wrong", traceback.format_exc()[-300:]))


def verdict(name):
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=answer, args=(name, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv()
    except EOFError:
        return "late", "its process ended"
    finally:
        process.join()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(N_PARTS))
def test_no_architecture_is_drawn_from_wrongly_or_changed(part, capsys):
    from tests.sampling.architectures import NAMES

    verdicts = {name: verdict(name) for name in NAMES[part::N_PARTS]}
    counts = collections.Counter(kind for kind, _ in verdicts.values())
    reasons = collections.Counter(reason[:60] for kind, reason in verdicts.values() if kind == "refused")
    with capsys.disabled():
        print(f"\n{len(verdicts)} architectures: {json.dumps(counts)}")
        for reason, count in reasons.most_common():
            print(f"  refused {count}: {reason}")
        for name, (kind, reason) in verdicts.items():
            if kind in ("wrong", "changed", "late"):
                print(f"  {kind} {name}: {reason}")
    assert not counts["wrong"] and not counts["changed"]
    assert counts["right"] > len(verdicts) / 4


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bert", "right"),
        pytest.param("llama", "right", marks=pytest.mark.slow),
        ("mamba", "none"),
        ("clip", "refused"),
    ],
)
def test_the_verdicts_on_known_architectures(name, expected):
    assert verdict(name)[0] == expected


def test_moments_that_differ_are_seen():
    torch.manual_seed(0)
    loop = torch.randn(N_DRAWS, 40, 8).double()
    assert disagreement(torch.randn(N_DRAWS, 40, 8).double(), loop) == ""
    assert "variances" in disagreement(1.5 * torch.randn(N_DRAWS, 40, 8).double(), loop)
    assert "means" in disagreement(0.5 + torch.randn(N_DRAWS, 40, 8).double(), loop)
    assert "random where" in disagreement(torch.randn(N_DRAWS, 40, 8).double() + 1, torch.ones(N_DRAWS, 40, 8).double())
