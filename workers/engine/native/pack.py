"""Weights in the layout of the native kernels (linear.h), from float32 [outputs, inputs].

16 bits: bfloat16. 8 bits: whole numbers with a scale for each output. 4 bits: whole numbers from 0 to 15 with a scale
and a least value for each group of 32 inputs, which are halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

BLOCK, TILE, GROUP = 32, 16, 32
_SHRUNK = tuple(1 - 0.03 * step for step in range(8))
"""of the span of a channel or group: a little less span costs its extremes and gives the rest a finer grid"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """One linear layer."""

    bits: int
    outputs: int
    """in the model; the packed weight has a multiple of 32"""
    inputs: int
    weight: torch.Tensor
    """uint8, flat"""
    scale: torch.Tensor
    """8 bits: of each output; else empty"""


def pack(weight: torch.Tensor, bits: int) -> Packed:
    """Quantise and lay out; bits is 4, 8 or 16."""
    outputs, inputs = weight.shape
    padded = F.pad(weight.float(), (0, 0, 0, -outputs % BLOCK))
    layout = {4: _four, 8: _eight, 16: _sixteen}[bits]
    laid_out, scale = layout(padded)
    return Packed(bits=bits, outputs=outputs, inputs=inputs, weight=laid_out.flatten(), scale=scale)


def eight_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole numbers from −127 to 127 and each output's scale, of those tried the one with the least squared error."""
    peak = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    best = torch.full_like(peak, torch.inf)
    scale = peak / 127
    for shrunk in _SHRUNK:
        tried = peak * (shrunk / 127)
        error = (_whole(weight, tried) * tried[:, None] - weight).square().sum(dim=1)
        better = error < best
        scale, best = torch.where(better, tried, scale), torch.where(better, error, best)
    return _whole(weight, scale), scale


def _whole(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale[:, None]).round().clamp(-127, 127)


def four_bits(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whole numbers from 0 to 15, [outputs, groups, 32]; each group's scale and least value, which are halves."""
    groups = weight.reshape(len(weight), -1, GROUP)
    low, high = groups.amin(dim=2), groups.amax(dim=2)
    best = torch.full_like(low, torch.inf)
    scale, least = torch.ones_like(low), low
    for shrunk in _SHRUNK:
        tried_least = (low + (high - low) * (1 - shrunk) / 2).half().float()
        tried = ((high - low) * shrunk / 15).half().float().clamp_min(2.0**-24)
        whole = ((groups - tried_least[..., None]) / tried[..., None]).round().clamp(0, 15)
        error = (whole * tried[..., None] + tried_least[..., None] - groups).square().sum(dim=2)
        better = error < best
        scale, least = torch.where(better, tried, scale), torch.where(better, tried_least, least)
        best = torch.where(better, error, best)
    whole = ((groups - least[..., None]) / scale[..., None]).round().clamp(0, 15)
    return whole, scale, least


def _sixteen(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    tiles = weight.bfloat16().view(outputs // TILE, TILE, inputs).permute(0, 2, 1)
    return tiles.contiguous().view(torch.uint8), torch.empty(0)


def _eight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    whole, scale = eight_bits(weight)
    tiles = whole.to(torch.int8).view(outputs // TILE, TILE, inputs // 2, 2).permute(0, 2, 1, 3)
    return tiles.contiguous().view(torch.uint8), scale


def _four(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    outputs, inputs = weight.shape
    whole, scale, least = four_bits(weight)
    # of a group: four parts of two times four inputs; the two share a byte
    parts = whole.to(torch.uint8).view(outputs // 8, 8, inputs // GROUP, 4, 2, 4)
    both = (parts[:, :, :, :, 0] | parts[:, :, :, :, 1] << 4).permute(0, 2, 3, 1, 4)
    numbers = both.reshape(outputs // 8, inputs // GROUP, 128)
    extremes = [
        part.half().view(outputs // 8, 8, inputs // GROUP).permute(0, 2, 1).contiguous().view(torch.uint8)
        for part in (scale, least)
    ]
    return torch.cat([numbers, *extremes], dim=2).contiguous(), torch.empty(0)
