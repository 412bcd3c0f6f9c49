r"""Many training steps of networks with one hidden layer as one CUDA kernel.

A block of the kernel is a member: its parameters and Adam's moments stay in registers from the first step of a call to
the last, and only batches and mask words are read. The stacked tensor operations of `Program.step` pass over
`[member, row, unit]` some twenty times a step instead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from dropbayes.population.program import Program

WIDEST_INPUT, WIDEST_HIDDEN = 64, 128
_ROWS_AT_ONCE = 64


def suits(program: Program) -> bool:
    """Whether the kernel supports these networks: one hidden layer, one Gaussian output, given drop probabilities."""
    return (
        len(program.widths) == 3
        and program.widths[0] <= WIDEST_INPUT
        and program.widths[1] <= WIDEST_HIDDEN
        and program.widths[2] == 1
        and program.head.name == "gaussian"
        and program.stack.kl_scale is None
        and bool((program.stack.n_inputs == program.widths[0]).all())
        and program.vector.dtype == torch.float32
    )


def advance(program: Program, steps: int) -> None:
    """Advances every member by a number of steps within the loaded chunk."""
    stack, keep = program.stack, (1 - program.stack.drop_prob).float()
    x, y, weight = program.data
    n_features, width, _ = program.widths
    exact = torch.get_float32_matmul_precision() == "highest"
    _steps[(len(stack.rows),)](
        x,
        y,
        weight,
        stack.rows,
        stack.size_group,
        program.positions,
        program.counts,
        *program.step_words,
        *stack.member_words,
        program.thresholds,
        keep,
        stack.weight_decay,
        program.rates,
        program.epsilons,
        program.step_in_chunk,
        *program.parameters,
        *program.views(program.first),
        *program.views(program.second),
        steps,
        len(stack.rows),
        stack.rows.shape[1],
        program.n_sizes,
        N_FEATURES=n_features,
        WIDTH=width,
        BATCH=program.batch_size,
        FEATURES=max(16, triton.next_power_of_2(n_features)),
        UNITS=max(16, triton.next_power_of_2(width)),
        LINES=min(_ROWS_AT_ONCE, max(16, triton.next_power_of_2(program.batch_size))),
        TANH=program.activation == "tanh",
        PRECISION="ieee" if exact else "tf32",
        BETA1=program.betas[0],
        BETA2=program.betas[1],
        num_warps=4 if width <= 64 else 8,
    )
    program.step_in_chunk += steps


@triton.jit
def _adam(parameter, first, second, gradient, rate, epsilon, BETA1: tl.constexpr, BETA2: tl.constexpr):
    first += (gradient - first) * (1 - BETA1)
    second = second * BETA2 + gradient * gradient * (1 - BETA2)
    return parameter - rate * first / (tl.sqrt(second) + epsilon), first, second


@triton.jit
def _steps(
    x_at,
    y_at,
    weight_at,
    rows_at,
    group_at,
    positions_at,
    counts_at,
    words1_at,
    words2_at,
    pad1_at,
    pad2_at,
    thresholds_at,
    keep_at,
    decay_at,
    rates_at,
    epsilons_at,
    place_at,
    w1_at,
    w2_at,
    b1_at,
    b2_at,
    fw1_at,
    fw2_at,
    fb1_at,
    fb2_at,
    sw1_at,
    sw2_at,
    sb1_at,
    sb2_at,
    n_steps,
    n_members,
    row_stride,
    n_groups,
    N_FEATURES: tl.constexpr,
    WIDTH: tl.constexpr,
    BATCH: tl.constexpr,
    FEATURES: tl.constexpr,
    UNITS: tl.constexpr,
    LINES: tl.constexpr,
    TANH: tl.constexpr,
    PRECISION: tl.constexpr,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
):
    member = tl.program_id(0).to(tl.int64)
    feature, unit = tl.arange(0, FEATURES), tl.arange(0, UNITS)
    is_feature, is_unit = feature < N_FEATURES, unit < WIDTH
    matrix = member * N_FEATURES * WIDTH + feature[:, None] * WIDTH + unit[None, :]
    in_matrix = is_feature[:, None] & is_unit[None, :]
    vector = member * WIDTH + unit
    w1, w2 = tl.load(w1_at + matrix, mask=in_matrix, other=0.0), tl.load(w2_at + vector, mask=is_unit, other=0.0)
    b1, b2 = tl.load(b1_at + vector, mask=is_unit, other=0.0), tl.load(b2_at + member)
    fw1, fw2 = tl.load(fw1_at + matrix, mask=in_matrix, other=0.0), tl.load(fw2_at + vector, mask=is_unit, other=0.0)
    fb1, fb2 = tl.load(fb1_at + vector, mask=is_unit, other=0.0), tl.load(fb2_at + member)
    sw1, sw2 = tl.load(sw1_at + matrix, mask=in_matrix, other=0.0), tl.load(sw2_at + vector, mask=is_unit, other=0.0)
    sb1, sb2 = tl.load(sb1_at + vector, mask=is_unit, other=0.0), tl.load(sb2_at + member)
    pad1 = tl.load(pad1_at + member * N_FEATURES + feature, mask=is_feature, other=0)
    pad2 = tl.load(pad2_at + member * WIDTH + unit, mask=is_unit, other=0)
    scale1, scale2 = 1 / tl.load(keep_at + member * 2), 1 / tl.load(keep_at + member * 2 + 1)
    decay1, decay2 = 2 * tl.load(decay_at + member * 2), 2 * tl.load(decay_at + member * 2 + 1)
    group, place = tl.load(group_at + member), tl.load(place_at)
    for step in range(n_steps):
        at = place + step
        below1 = tl.load(thresholds_at + (at * 2) * n_members + member)
        below2 = tl.load(thresholds_at + (at * 2 + 1) * n_members + member)
        count = tl.load(counts_at + at * n_groups + group)
        gw1, gw2 = decay1 * w1, decay2 * w2
        gb1, gb2 = tl.zeros([UNITS], tl.float32), 0.0
        for start in range(0, BATCH, LINES):
            line = start + tl.arange(0, LINES)
            is_line = line < BATCH
            position = tl.load(positions_at + (at * n_groups + group) * BATCH + line, mask=is_line, other=0)
            row = tl.load(rows_at + member * row_stride + position, mask=is_line, other=0)
            y = tl.load(y_at + row, mask=is_line, other=0.0)
            weight = tl.load(weight_at + row, mask=is_line, other=0.0)
            in_x = is_line[:, None] & is_feature[None, :]
            x = tl.load(x_at + row[:, None] * N_FEATURES + feature[None, :], mask=in_x, other=0.0)
            words = tl.load(
                words1_at + (at * BATCH + line[:, None]) * N_FEATURES + feature[None, :], mask=in_x, other=0
            )
            x = tl.where((words ^ pad1[None, :]) >= below1, x * scale1, 0.0)
            z = tl.dot(x, w1, input_precision=PRECISION) + b1[None, :]
            in_h = is_line[:, None] & is_unit[None, :]
            words = tl.load(words2_at + (at * BATCH + line[:, None]) * WIDTH + unit[None, :], mask=in_h, other=0)
            kept = tl.where((words ^ pad2[None, :]) >= below2, scale2, 0.0)
            active = 2 * tl.sigmoid(2 * z) - 1 if TANH else tl.maximum(z, 0.0)
            slope = 1 - active * active if TANH else tl.where(z > 0, 1.0, 0.0)
            dropped = active * kept
            error = (tl.sum(dropped * w2[None, :], 1) + b2 - y) * weight / count
            gw2 += tl.sum(dropped * error[:, None], 0)
            gb2 += tl.sum(error, 0)
            delta = error[:, None] * w2[None, :] * kept * slope
            gb1 += tl.sum(delta, 0)
            gw1 += tl.dot(tl.trans(x), delta, input_precision=PRECISION)
        rate, epsilon = tl.load(rates_at + at * n_members + member), tl.load(epsilons_at + at)
        w1, fw1, sw1 = _adam(w1, fw1, sw1, gw1, rate, epsilon, BETA1, BETA2)
        w2, fw2, sw2 = _adam(w2, fw2, sw2, gw2, rate, epsilon, BETA1, BETA2)
        b1, fb1, sb1 = _adam(b1, fb1, sb1, gb1, rate, epsilon, BETA1, BETA2)
        b2, fb2, sb2 = _adam(b2, fb2, sb2, gb2, rate, epsilon, BETA1, BETA2)
    tl.store(w1_at + matrix, w1, mask=in_matrix)
    tl.store(w2_at + vector, w2, mask=is_unit)
    tl.store(b1_at + vector, b1, mask=is_unit)
    tl.store(b2_at + member, b2)
    tl.store(fw1_at + matrix, fw1, mask=in_matrix)
    tl.store(fw2_at + vector, fw2, mask=is_unit)
    tl.store(fb1_at + vector, fb1, mask=is_unit)
    tl.store(fb2_at + member, fb2)
    tl.store(sw1_at + matrix, sw1, mask=in_matrix)
    tl.store(sw2_at + vector, sw2, mask=is_unit)
    tl.store(sb1_at + vector, sb1, mask=is_unit)
    tl.store(sb2_at + member, sb2)
