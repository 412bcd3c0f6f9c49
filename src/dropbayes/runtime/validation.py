"""Arguments: arrays of any library as tensors, and one clear error that names the argument, the rule and the value.

A function of numbers (`check_...`) returns nothing; a function of arrays is named after what it returns, the array as a
tensor that obeys the rule. NumPy arrays and lists of numbers are accepted wherever a tensor is.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NumpyArray = npt.NDArray[Any]
Numbers = npt.NDArray[np.float64]
Array = Tensor | NumpyArray


def check_positive(name: str, value: Any, *, allow_zero: bool = False) -> None:
    """Raises unless `value` is a positive number, or a scalar tensor of one (a parameter that is being learned)."""
    number = value
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(f"`{name}` must be a number or a scalar tensor; got shape {tuple(value.shape)}.")
        number = value.detach().item()
    if not (_is_finite_number(number) and (number > 0 or (allow_zero and number == 0))):
        rule = "a finite number, zero or more" if allow_zero else "a positive finite number"
        raise ValueError(f"`{name}` must be {rule}; got {value!r}.")


def check_number(name: str, value: object) -> None:
    """Raises on a tensor for a value that gets no gradient."""
    if isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a number, not a tensor: nothing here can be learned. Pass {name}.item().")


def check_keep_prob(value: float) -> None:
    if not (hasattr(value, "__float__") and 0 < value <= 1):
        meaning = "It is the paper's p, the probability that a unit stays: one minus the `p` of torch.nn.Dropout"
        raise ValueError(f"`keep_prob` must lie in (0, 1]; got {value!r}. {meaning}.")


def check_n_data(value: float) -> None:
    if not (hasattr(value, "__float__") and 1 <= value < math.inf):
        raise ValueError(f"`n_data` must be at least 1, the number of training rows; got {value!r}.")


def check_probability(name: str, value: float, *, closed: bool = False) -> None:
    """Raises unless `value` is a number strictly between 0 and 1, or from 0 to 1 with `closed`."""
    if not (_is_finite_number(value) and (0 <= value <= 1 if closed else 0 < value < 1)):
        rule = "lie between 0 and 1" if closed else "lie strictly between 0 and 1 (0.9 for 90 %)"
        raise ValueError(f"`{name}` must {rule}; got {value!r}.")


def check_count(name: str, value: int, *, at_least: int = 1, at_most: int | None = None) -> None:
    """Raises unless `value` is a whole number in the range."""
    if not _is_whole(value) or value < at_least or (at_most is not None and value > at_most):
        rule = f"at least {at_least}" if at_most is None else f"between {at_least} and {at_most}"
        raise ValueError(f"`{name}` must be a whole number, {rule}; got {value!r}.")


def check_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raises unless `value` is one of the choices."""
    known = tuple(choices)
    if value not in known:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, known))}; got {value!r}.")


def check_type(name: str, value: object, kinds: type | tuple[type, ...], rule: str) -> None:
    """Raises unless `value` is of one of these classes: the argument `name` must `rule`, in words."""
    if not isinstance(value, kinds):
        raise TypeError(f"`{name}` must {rule}; got {' '.join(repr(value).split())[:120]}.")


def random_generator(seed: int) -> torch.Generator:
    """A generator on the CPU with the seed, a whole number."""
    if not _is_whole(seed):
        raise TypeError(f"`seed` must be a whole number; got {seed!r}.")
    return torch.Generator().manual_seed(int(seed))


def _is_whole(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and type(value) is not bool


def _is_finite_number(value: object) -> bool:
    return isinstance(value, (int, float, np.number)) and type(value) is not bool and math.isfinite(value)


NOT_FINITE = "`net` gave NaN or infinite outputs or slopes. Check the input rows and weights for NaN, or use float32."


def to_tensor(array: Any, *, name: str = "array") -> Tensor:
    """A tensor as it is; anything else that NumPy reads as real numbers or truth values, copied."""
    if isinstance(array, Tensor):
        if array.layout is not torch.strided or array.is_meta:
            kind = "on the meta device" if array.is_meta else f"of layout {array.layout}"
            raise TypeError(f"`{name}` must be a dense tensor of numbers; got one {kind}. Pass it dense: to_dense().")
        return array
    refusal = f"`{name}` must be a tensor or an array of numbers; got {type(array).__name__}"
    if np.ma.is_masked(array):  # what is under a mask is no value
        raise TypeError(f"{refusal} with {np.ma.count_masked(array)} masked values. Leave those rows out.")
    try:
        values = np.array(array, order="C")  # copied: pandas' are often read-only, and a tensor would write to them
    except ValueError:
        raise TypeError(f"{refusal} whose parts differ in length.") from None
    if values.dtype == object and all(isinstance(value, numbers.Real) for value in values.flat):
        values = values.astype(np.float64)  # a frame whose columns have several dtypes
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{refusal} of dtype {values.dtype}.")
    return torch.from_numpy(values.astype(values.dtype.newbyteorder("="), copy=False))


def float_tensor(array: Array | float, *, name: str = "array") -> Tensor:
    """The array as a floating tensor: integers as float64, half precision as float32, NumPy arrays copied."""
    tensor = to_tensor(array, name=name)
    if tensor.is_complex():
        raise ValueError(f"`{name}` must hold real numbers; got {tensor.dtype}.")
    least = torch.float32 if tensor.is_floating_point() else torch.float64
    return tensor.to(torch.promote_types(tensor.dtype, least))


def finite_tensor(name: str, array: Array | float, *, axes: str | None = None, infinite: bool = False) -> Tensor:
    """The array as a floating tensor of axes such as "[row, ...]", not empty, no NaN and, unless `infinite`, no inf."""
    tensor = float_tensor(array, name=name)
    if axes is not None:
        names = axes.strip("[]").split(", ")
        least = len(names) - ("..." in names)
        if tensor.dim() < least or (tensor.dim() > least and "..." not in names):
            remedy = " Average draws over axis 0 first." if axes == "[row, class]" and tensor.dim() == 3 else ""
            raise ValueError(f"`{name}` must be {axes}; got shape {tuple(tensor.shape)}.{remedy}")
    if tensor.numel() == 0:
        raise ValueError(f"`{name}` must not be empty; got shape {tuple(tensor.shape)}.")
    bad = tensor.isnan() if infinite else ~tensor.isfinite()
    if bool(bad.any()):
        rule = "not contain NaN" if infinite else "be finite"
        got = f"{int(bad.sum())} of {tensor.numel()} values are {'NaN' if infinite else 'not'}"
        raise ValueError(f"`{name}` must {rule}; {got}. Remove those rows first.")
    return tensor


def check_values(name: str, values: Tensor, *, positive: bool = False, at_most: float | None = None) -> None:
    """Raises unless every value is at least 0, or greater if `positive`, and at most `at_most`."""
    low, high = values.min().item(), values.max().item()
    if low < 0 or (positive and low == 0) or (at_most is not None and high > at_most):
        rule = "be positive" if positive else "be at least 0" if at_most is None else f"lie between 0 and {at_most:g}"
        raise ValueError(f"`{name}` must {rule}; got {extent(values)}.")


def extent(values: Tensor) -> str:
    """The smallest and the largest of the values, for a message."""
    return f"{values.min().item():.3g} to {values.max().item():.3g}"


def row_values(name: str, array: Array, *, n_rows: int | None = None, infinite: bool = False) -> Tensor:
    """One number per row, `[row]`: as many as there are rows, none of them NaN."""
    tensor = finite_tensor(name, array, axes="[row]", infinite=infinite)
    if n_rows is not None and len(tensor) != n_rows:
        raise ValueError(f"`{name}` must have one value per row; got {len(tensor)} for {n_rows} rows.")
    return tensor


def matching_tensors(arrays: Mapping[str, Array], *, draws: str | None = None, infinite: bool = False) -> list[Tensor]:
    """The arrays, by argument name, as finite tensors of one dtype and shape; that of `draws` has an axis before."""
    tensors = {name: finite_tensor(name, array, infinite=infinite) for name, array in arrays.items()}
    shapes = {name: tuple(tensor.shape[1:] if name == draws else tensor.shape) for name, tensor in tensors.items()}
    # Broadcasting `[row, 1]` against `[row]` would pair every row with every other.
    if len(set(shapes.values())) != 1 or not next(iter(shapes.values())):
        got = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        rule = " and ".join(f"`{name}`" for name in arrays) + " must have one shape, [row, ...]"
        rule += f", `{draws}` with an axis of draws before it" if draws else ""
        remedy = "Reshape y (y[:, None] for a one-column output) or squeeze the prediction"
        raise ValueError(f"{rule}; got {got}. {remedy}.")
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors.values()), torch.float32)
    device = next(iter(tensors.values())).device
    return [tensor.to(device, dtype) for tensor in tensors.values()]


def outcomes(y: object) -> Tensor:
    """Outcomes as a tensor of finite numbers; truth values and whole numbers of any width as int64."""
    tensor = to_tensor(y, name="y")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor.long()
    finite_tensor("y", tensor)
    return tensor


def row_weights(
    sample_weight: Array | None, n_rows: int, *, like: Tensor | None = None, name: str = "sample_weight"
) -> Tensor:
    """The weight of each row, `[row]` in float64 on the device of `like`: zero or more, not all zero; 1 by default."""
    device = None if like is None else like.device
    if sample_weight is None:
        return torch.ones(n_rows, dtype=torch.float64, device=device)
    weight = row_values(name, sample_weight, n_rows=n_rows).detach().to(device, torch.float64)
    if not (bool((weight >= 0).all()) and bool((weight > 0).any())):
        raise ValueError(f"`{name}` must be zero or more and not all zero; got values from {extent(weight)}.")
    return weight


def repeated_rows(sample_weight: Array | None, *columns: Tensor) -> list[Tensor]:
    """The columns with each row repeated by its weight: a p-value and a certificate count rows, not fractions."""
    weight = row_weights(sample_weight, len(columns[0]), like=columns[0])
    if not bool((weight == weight.round()).all()):
        rule = "hold whole numbers here, how many independent rows each row stands for"
        raise ValueError(f"`sample_weight` must {rule}; got values from {extent(weight)} with fractions.")
    if weight.sum() > 1e8:
        raise ValueError(f"`sample_weight` must add up to at most 100,000,000 rows here; got {weight.sum():.3g}.")
    return [column.repeat_interleave(weight.long(), 0) for column in columns]


def class_probabilities(name: str, array: Array, *, axes: str = "[row, class]") -> Tensor:
    """The array, of these axes, as a floating tensor of probabilities: at least 0, summing to 1 over the last axis."""
    # Probabilities may be off by rounding: of a half-precision softmax over many classes, or to three printed digits.
    is_half = getattr(array, "dtype", None) in (torch.float16, torch.bfloat16, np.dtype("float16"))
    tensor = finite_tensor(name, array, axes=axes)
    totals, tolerance = tensor.detach().sum(-1), 1e-2 if is_half else 1e-3
    if not (bool((tensor >= 0).all()) and bool(((totals - 1).abs() <= tolerance).all())):
        rule = "be probabilities: at least 0 and summing to 1 over the class axis"
        got = f"values from {extent(tensor)} and sums from {extent(totals)}"
        raise ValueError(f"`{name}` must {rule}; got {got}. Apply softmax to logits first.")
    return tensor / totals.unsqueeze(-1) if is_half else tensor


def class_labels(labels: Array, *, n_rows: int, n_classes: int, device: torch.device | None = None) -> Tensor:
    """The class indices as int64, `[row]`: whole numbers from 0 to `n_classes` - 1."""
    indices = to_tensor(labels, name="labels")
    if indices.is_floating_point() or indices.is_complex() or indices.dim() != 1 or len(indices) != n_rows:
        got = f"shape {tuple(indices.shape)} of {indices.dtype}. Pass labels.argmax(-1) for one-hot rows"
        raise ValueError(f"`labels` must be integers, one class index for each of the {n_rows} rows; got {got}.")
    indices = indices.long().to(device)
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= n_classes:
        raise ValueError(f"`labels` must lie between 0 and {n_classes - 1}, the class axis; got {low} to {high}.")
    return indices


def events(name: str, array: Array, *, n_rows: int) -> Tensor:
    """Whether the event occurred, `[row]`, from booleans or from zeros and ones."""
    tensor = to_tensor(array, name=name)
    binary = not tensor.is_complex() and bool(((tensor == 0) | (tensor == 1)).all())
    if tensor.dim() != 1 or len(tensor) != n_rows or not binary:
        got = f"shape {tuple(tensor.shape)} of {tensor.dtype}"
        raise ValueError(f"`{name}` must hold true or false (1 or 0) for each of the {n_rows} rows; got {got}.")
    return tensor.bool()


def quote(value: object) -> str:
    """A value quoted for a message: on one line, without control characters or halves of one, not too long."""
    text = str(value)
    return repr(text if len(text) <= 40 else text[:39] + "…")


@contextlib.contextmanager
def needed_for(what: str, *, extra: str | None = None) -> Iterator[None]:
    """A context of imports: an error for a missing package says what needs it and how to install it, or its extra."""
    try:
        yield
    except ModuleNotFoundError as error:
        name = str(error.name).partition(".")[0]
        way = f"pip install {name}" if extra is None else f"pip install -e '.[{extra}]' in a clone of dropbayes"
        raise ModuleNotFoundError(f"{what} needs {name}, which is not installed: {way}.") from None
