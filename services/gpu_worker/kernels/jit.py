"""gpu_worker: what a kernel is to the rest of the program: something that is launched over a grid.

Kernels are plain functions in Triton's language. Parameters that are known when a kernel is compiled are annotated
`tl.constexpr`; all others, tensors and numbers, `tl.tensor`, which is what they are inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar, cast

import triton

F = TypeVar("F", bound=Callable[..., Any])


class Kernel(Protocol):
    """A compiled function: `kernel[grid](*arguments)` puts one run of it over the grid into the device's queue."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        """What launches it over a grid of one to three dimensions."""


def kernel(function: Callable[..., None]) -> Kernel:
    """Makes a kernel of a function; it is compiled at its first launch with each set of compile-time parameters."""
    return cast(Kernel, triton.jit(function))


def kernel_part(function: F) -> F:
    """Makes a function that kernels call; it becomes part of each."""
    return cast(F, triton.jit(function))


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less: tiles have such sides. 1 for numbers below."""
    return 1 << max(0, number - 1).bit_length()
