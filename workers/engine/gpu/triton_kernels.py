"""The kernels themselves, in Triton. Each program computes its rows in one fixed order, whatever runs beside them.

TRITON_INTERPRET=1 runs them on the CPU in float32; they also compile for a Hopper GPU on a machine without one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,
    weight,
    scale,
    bias,
    y,
    rows,
    outputs,
    inputs,
    SCALED: tl.constexpr,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """y = x · (weight · scale)ᵀ + bias: [rows, inputs], [outputs, inputs] → [rows, outputs].

    A program computes a block transposed, weights · rows: a matrix instruction takes at least 64 rows of its first
    operand and few columns of its second, and there are few rows when tokens are generated. Inputs are added in order,
    in one accumulator, and never cut among programs. `EVEN`: BLOCK_INPUTS divides `inputs`.
    """
    row_blocks = tl.cdiv(rows, BLOCK_ROWS)
    out = (tl.program_id(0) // row_blocks) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    row = (tl.program_id(0) % row_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at = tl.arange(0, BLOCK_INPUTS)
    weights = weight + out[:, None].to(tl.int64) * inputs + at[None, :]
    columns = x + row[None, :].to(tl.int64) * inputs + at[:, None]
    in_outputs, in_rows = out[:, None] < outputs, row[None, :] < rows
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for begin in range(0, inputs, BLOCK_INPUTS):
        if EVEN:
            left = tl.load(weights, mask=in_outputs, other=0)
            right = tl.load(columns, mask=in_rows, other=0.0)
        else:
            left = tl.load(weights, mask=in_outputs & (at[None, :] < inputs - begin), other=0)
            right = tl.load(columns, mask=in_rows & (at[:, None] < inputs - begin), other=0.0)
        total = tl.dot(left.to(right.dtype), right, total, input_precision="ieee")
        weights += BLOCK_INPUTS
        columns += BLOCK_INPUTS
    if SCALED:
        total = total * tl.load(scale + out, mask=out < outputs, other=0.0)[:, None]
    if BIASED:
        total = total + tl.load(bias + out, mask=out < outputs, other=0.0)[:, None]
    target = y + row[None, :].to(tl.int64) * outputs + out[:, None]
    tl.store(target, total.to(y.dtype.element_ty), mask=in_outputs & in_rows)


@triton.jit
def norm(residual, delta, weight, y, epsilon, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """A row: residual += delta; y = residual / its root mean square · weight."""
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    begin = tl.program_id(0).to(tl.int64) * WIDTH
    row = tl.load(residual + begin + at, mask=inside, other=0.0)
    if ADDS:
        row = row + tl.load(delta + begin + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual + begin + at, row, mask=inside)
    mean = tl.sum(row * row, axis=0) / WIDTH
    normed = row * tl.rsqrt(mean + epsilon) * tl.load(weight + at, mask=inside, other=0.0)
    tl.store(y + begin + at, normed.to(y.dtype.element_ty), mask=inside)


@triton.jit
def place(
    mixed,
    query_norm,
    key_norm,
    cos,
    sin,
    positions,
    cells,
    queries,
    keys,
    values,
    epsilon,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMED: tl.constexpr,
):
    """One head of one row: turned by its position, and where it belongs; a value as it is."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside = at < HALF
    source = mixed + (row * (QUERIES + 2 * KEYS) + head) * (2 * HALF) + at
    real = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    imaginary = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cell = tl.load(cells + row).to(tl.int64) * KEYS * (2 * HALF)
    if head < QUERIES + KEYS:
        if NORMED:
            mean = (tl.sum(real * real, axis=0) + tl.sum(imaginary * imaginary, axis=0)) / (2 * HALF)
            weight = (query_norm if head < QUERIES else key_norm) + at
            turned = tl.rsqrt(mean + epsilon)
            real = real * turned * tl.load(weight, mask=inside, other=0.0)
            imaginary = imaginary * turned * tl.load(weight + HALF, mask=inside, other=0.0)
        angle = tl.load(positions + row).to(tl.int64) * HALF + at
        c = tl.load(cos + angle, mask=inside, other=0.0)
        s = tl.load(sin + angle, mask=inside, other=0.0)
        first = real * c - imaginary * s
        second = imaginary * c + real * s
        if head < QUERIES:
            target = queries + (row * QUERIES + head) * (2 * HALF) + at
        else:
            target = keys + cell + (head - QUERIES) * (2 * HALF) + at
        tl.store(target, first.to(queries.dtype.element_ty), mask=inside)
        tl.store(target + HALF, second.to(queries.dtype.element_ty), mask=inside)
    else:
        target = values + cell + (head - QUERIES - KEYS) * (2 * HALF) + at
        tl.store(target, real.to(queries.dtype.element_ty), mask=inside)
        tl.store(target + HALF, imaginary.to(queries.dtype.element_ty), mask=inside)


@triton.jit
def gate(gate_up, y, INNER: tl.constexpr, BLOCK: tl.constexpr):
    """Part of a row: silu(first half) · second half."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INNER
    source = gate_up + row * (2 * INNER) + at
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + INNER, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * INNER + at, (first / (1.0 + tl.exp(-first)) * second).to(y.dtype.element_ty), mask=inside)
