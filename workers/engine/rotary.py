"""Rotary position embeddings."""

from __future__ import annotations

import torch


def rotations(inverse_frequencies: tuple[float, ...], context_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles: [positions, head size / 2]."""
    steps = torch.arange(context_tokens, dtype=torch.float64)
    angles = steps[:, None] * torch.tensor(inverse_frequencies, dtype=torch.float64)
    return angles.cos().float(), angles.sin().float()
