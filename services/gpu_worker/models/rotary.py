"""gpu_worker: rotary position embedding: which frequencies a configuration asks for, and turning heads by them.

Sources: RoFormer (arXiv 2104.09864); position interpolation, `linear` (arXiv 2306.15595); YaRN (arXiv 2309.00071);
`llama3` as published with Llama 3.1. Field names are those of config.json, in both spellings: `rope_scaling` beside
`rope_theta`, and `rope_parameters` that holds both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.gpu_worker.models.config_fields import ConfigFields

_DEFAULT_THETA = 10000.0
_KNOWN_NAMES = (
    {"rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "partial_rotary_factor"}
    | {"low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "truncate"}
    | {"attention_factor", "mscale", "mscale_all_dim"}
)


@dataclass(frozen=True, slots=True)
class RotaryConfig:
    """The frequencies of a model's rotary embedding.

    Attributes:
        inverse_frequencies: head_dim / 2 float32 values; pair i turns by position * inverse_frequencies[i] radians.
        attention_scale: factor on cosine and sine (YaRN's temperature), 1.0 for the other types.
    """

    inverse_frequencies: tuple[float, ...]
    attention_scale: float


def parse_rotary(fields: ConfigFields, head_dim: int, max_positions: int) -> RotaryConfig:
    """Reads the rotary embedding of a model from its configuration.

    Args:
        fields: the whole configuration.
        head_dim: width of a head, even.
        max_positions: `max_position_embeddings`, what a scaled type falls back to as its original length.

    Raises:
        ModelFileError: an unknown or unsupported type, a missing or impossible value, or two spellings that disagree.
    """
    scaling = _scaling_fields(fields)
    theta = fields.number("rope_theta", _DEFAULT_THETA)
    _refuse_partial(fields)
    if scaling is None:
        return RotaryConfig(_as_floats(_plain_frequencies(theta, head_dim)), 1.0)
    _refuse_partial(scaling)
    for name in scaling.names():
        if name not in _KNOWN_NAMES:
            raise scaling.error(name, "is not known, and may change how positions are turned")
    theta = scaling.number("rope_theta", theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    read = _READERS.get(kind)
    if read is None:
        name = "rope_type" if scaling.has("rope_type") else "type"
        raise scaling.error(name, f"{kind!r} is not supported (supported: {', '.join(_READERS)})")
    original = scaling.integer(
        "original_max_position_embeddings", fields.integer("original_max_position_embeddings", max_positions)
    )
    frequencies, scale = read(scaling, _Basis(theta, head_dim, original))
    return RotaryConfig(_as_floats(frequencies), scale)


def rotary_cos_sin(frequencies: Tensor, scale: float, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine for `rotate`, computed once a step in float32 and rounded to the model's dtype.

    Args:
        frequencies: [head_dim / 2] float32, `RotaryConfig.inverse_frequencies` on the device.
        scale: `RotaryConfig.attention_scale`.
        positions: [num_tokens] int64.
        dtype: of the model.

    Returns:
        Two tensors [num_tokens, 1, head_dim]: the cosine of both halves of a head, and the sine, negated for the first
        half.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies  # [num_tokens, head_dim / 2]
    cos = angles.cos() * scale
    sin = angles.sin() * scale
    both_cos = torch.cat((cos, cos), dim=-1).to(dtype)  # [num_tokens, head_dim]
    both_sin = torch.cat((-sin, sin), dim=-1).to(dtype)  # [num_tokens, head_dim]
    return both_cos[:, None], both_sin[:, None]  # [num_tokens, 1, head_dim] each


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + head_dim / 2) of every head by its angle.

    (a, b) becomes (a cos - b sin, b cos + a sin); `sin` carries the sign of the first half, so that swapping the halves
    is all that is left to do.

    Args:
        heads: [num_tokens, num_heads, head_dim].
        cos: [num_tokens, 1, head_dim], from `rotary_cos_sin`.
        sin: likewise.

    Returns:
        [num_tokens, num_heads, head_dim], a new tensor.
    """
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, sin)


@dataclass(frozen=True, slots=True)
class _Basis:
    """What every scaled type starts from."""

    theta: float
    head_dim: int
    original_positions: int


_Frequencies = tuple[Tensor, float]


def _scaling_fields(fields: ConfigFields) -> ConfigFields | None:
    old, new = fields.group("rope_scaling"), fields.group("rope_parameters")
    if old is not None and new is not None:
        raise fields.error("rope_parameters", "stands beside rope_scaling; one of them says how positions are scaled")
    return old or new


def _refuse_partial(fields: ConfigFields) -> None:
    if fields.number("partial_rotary_factor", 1.0) != 1.0:
        raise fields.error("partial_rotary_factor", "only whole heads can be rotated (1.0)")


def _plain_frequencies(theta: float, head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / theta**exponents


def _default(scaling: ConfigFields, basis: _Basis) -> _Frequencies:
    return _plain_frequencies(basis.theta, basis.head_dim), 1.0


def _linear(scaling: ConfigFields, basis: _Basis) -> _Frequencies:
    return _plain_frequencies(basis.theta, basis.head_dim) / scaling.number("factor"), 1.0


def _llama3(scaling: ConfigFields, basis: _Basis) -> _Frequencies:
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high:
        raise scaling.error("high_freq_factor", f"must be larger than low_freq_factor ({low} and {high})")
    plain = _plain_frequencies(basis.theta, basis.head_dim)
    # Turns within the original context: below `low` a frequency is divided by the factor, above `high` it is kept.
    turns = basis.original_positions * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * plain / factor + kept * plain, 1.0


def _yarn(scaling: ConfigFields, basis: _Basis) -> _Frequencies:
    factor = scaling.number("factor")
    first = _yarn_dimension(scaling.number("beta_fast", 32.0), basis)
    last = _yarn_dimension(scaling.number("beta_slow", 1.0), basis)
    if scaling.flag("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, basis.head_dim - 1)
    # A ramp of no width would divide by zero.
    width = last - first if last != first else 0.001
    pairs = torch.arange(basis.head_dim // 2, dtype=torch.float32)
    interpolated = ((pairs - first) / width).clamp(0.0, 1.0)
    plain = _plain_frequencies(basis.theta, basis.head_dim)
    return interpolated * plain / factor + (1 - interpolated) * plain, _yarn_scale(scaling, factor)


def _yarn_dimension(turns: float, basis: _Basis) -> float:
    """The (fractional) index of the pair that turns this often within the original context."""
    return basis.head_dim * math.log(basis.original_positions / (turns * 2 * math.pi)) / (2 * math.log(basis.theta))


def _yarn_scale(scaling: ConfigFields, factor: float) -> float:
    if scaling.has("attention_factor"):
        return scaling.number("attention_factor")
    if scaling.has("mscale") and scaling.has("mscale_all_dim"):
        return _mscale(factor, scaling.number("mscale")) / _mscale(factor, scaling.number("mscale_all_dim"))
    return _mscale(factor, 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _as_floats(frequencies: Tensor) -> tuple[float, ...]:
    return tuple(frequencies.tolist())


_READERS: dict[str, Callable[[ConfigFields, _Basis], _Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
