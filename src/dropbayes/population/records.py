r"""The records of a population: the data sets, the members' settings, the stacked parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map, tree_map_only

from dropbayes.population.heads import HEADS, Head

Activation = Literal["relu", "tanh"]
ACTIVATIONS: dict[str, tuple[Any, type[nn.Module]]] = {"relu": (torch.relu, nn.ReLU), "tanh": (torch.tanh, nn.Tanh)}


@dataclass(frozen=True)
class Task:
    """A data set in its own units: training rows and, optionally, held-out rows.

    Args:
        x: Inputs `[row, feature]`.
        y: Targets `[row]` or `[row, output]`; integer class indices `[row]` for the categorical likelihood.
        weight: The weight of each row in the objective (a row of weight 2 counts twice); all one by default.
        held_out: `(x, y)` or `(x, y, weight)` of rows to score its members on.
    """

    x: Any
    y: Any
    weight: Any = None
    held_out: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Member:
    r"""The settings of one network of a population.

    Args:
        task: The index of its task.
        drop_prob: The probability of dropping a unit before each weight layer: one number, or one per layer.
        weight_decay: $\lambda$ in $\lambda \|\mathbf M_i\|^2$, added to the mean over rows of half the squared error
            (or the negative log-likelihood), in standardised units. Biases are not penalised.
        precision: $\tau$ in units of 1/y². When given, it sets the weight decay of each layer to
            $\lambda_i = p_i l^2 / (2 N \tau)$ with $p_i$ the keep probability [GG16, eq:weightdecay_tau_relation].
        length_scale: The prior length-scale $l$, of standardised inputs.
        learning_rate: The learning rate of Adam.
        epochs: The number of passes over the task's rows.
        seed: The seed of its initial weights, its batches and its masks.
        n_inputs: The number of leading columns that it sees; None for all of them. Weights of the others are zero.
        relevance: A factor on each input that it sees while it learns; the trained weights include it.
        offset: Whether it learns the difference of y from an offset of each row (see `choose_ensemble`).
    """

    task: int = 0
    drop_prob: float | tuple[float, ...] = 0.05
    weight_decay: float = 1e-6
    precision: float | None = None
    length_scale: float = 1e-2
    learning_rate: float = 1e-3
    epochs: int = 100
    seed: int = 0
    n_inputs: int | None = None
    relevance: tuple[float, ...] | None = None
    offset: bool = False


@dataclass(frozen=True, eq=False)
class Population:
    """Trained networks of one architecture, stacked; axis 0 of every tensor is the member.

    `precision` is τ of each output in units of 1/y² (for a heteroscedastic head: the factor on its own precision, over
    the squared scale of y), which `fit_precision` sets from held-out draws.
    """

    members: tuple[Member, ...]
    weights: tuple[Tensor, ...]  # one [member, in, out] per weight layer
    biases: tuple[Tensor, ...]  # one [member, 1, out] per weight layer
    drop_prob: Tensor  # [member, layer], learned or given
    precision: Tensor  # [member, output]
    x_mean: Tensor  # [member, feature], as the next
    x_scale: Tensor
    y_mean: Tensor  # [member, output], as the next
    y_scale: Tensor
    diverged: Tensor  # whose parameters overflowed: they hold their initial weights and score −∞
    head: Head = HEADS["gaussian"]
    activation: Activation = "relu"

    def __len__(self) -> int:
        return len(self.members)

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    def cpu(self) -> Self:
        """The same networks on the CPU."""
        return type(self)(**tree_map_only(Tensor, Tensor.cpu, vars(self)))


# The tensors of a population with one entry per member, except weights and biases.
STACKED = ("drop_prob", "precision", "x_mean", "x_scale", "y_mean", "y_scale", "diverged")


def select(population: Population, index: Sequence[int] | Tensor) -> Population:
    """The sub-population of the members with these indices, in that order."""
    chosen = torch.as_tensor(index, dtype=torch.long, device=population.device)
    tensors = tree_map_only(Tensor, lambda values: values[chosen], vars(population))
    return Population(**{**tensors, "members": tuple(population.members[i] for i in chosen.tolist())})


def concatenate(populations: Sequence[Population]) -> Population:
    """The members of several populations of one architecture, one after another."""
    members = tuple(member for population in populations for member in population.members)
    trees = [{**vars(population), "members": None} for population in populations]
    joined = tree_map(lambda *of: torch.cat(of) if isinstance(of[0], Tensor) else of[0], *trees)
    return Population(**{**joined, "members": members})


def network(population: Population, index: int) -> nn.Sequential:
    """The member of this index as a torch network of standardised inputs and outputs, dropout before every layer."""
    layers: list[nn.Module] = []
    for depth, (weight, bias) in enumerate(zip(population.weights, population.biases, strict=True)):
        if depth:
            layers.append(ACTIVATIONS[population.activation][1]())
        # Without initial values, which would be drawn from torch's global generator at every prediction.
        linear = nn.Linear(*weight.shape[1:], device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(weight[index].detach().T.clone(memory_format=torch.contiguous_format))
        linear.bias = nn.Parameter(bias[index, 0].detach().clone())
        layers += [nn.Dropout(float(population.drop_prob[index, depth])), linear]
    return nn.Sequential(*layers)


def drop_probs(member: Member, n_layers: int) -> list[float]:
    """The drop probability before each weight layer of a member."""
    values = list(member.drop_prob) if isinstance(member.drop_prob, tuple) else [member.drop_prob] * n_layers
    if len(values) != n_layers:
        rule = f"must be one number or one per weight layer ({n_layers} here, the output layer counted)"
        raise ValueError(f"`drop_prob` {rule}; got {len(values)}. Give {n_layers} numbers or change `hidden`.")
    if not all(0 <= p <= 0.999 for p in values):
        meaning = "the share of units dropped, not kept"
        raise ValueError(f"`drop_prob` must lie in [0, 0.999]; got {values}. It is {meaning}.")
    return values
