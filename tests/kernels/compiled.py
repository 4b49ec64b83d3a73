"""Compiles what our functions would launch, for real devices, without one: `python -m tests.kernels.compiled`.

Every launch is caught, and its kernel compiled down to machine code with the launch's own compile-time parameters.
Prints a line for each: function, target, bytes of shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bench.device import kernel_cases
from bench.device.kernel_cases import AttentionCase, GroupedCase, RotaryCase
from services.gpu_worker.fp8 import E4M3, E5M2
from services.gpu_worker.models.config import ExpertConfig

CPU = torch.device("cpu")
TARGETS = (80, 90)  # A100, H100 and H200
_OPTIONS = ("num_warps", "num_stages")
_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    E4M3: "*fp8e4nv",
    E5M2: "*fp8e5",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

_compiled: set[tuple[object, ...]] = set()


def main() -> None:
    """Compiles all of them."""
    JITFunction.run = _compile_launch
    for case in _attention_cases():
        kernel_cases.attention_results(case, CPU)
    for dtype in (torch.bfloat16, torch.float32):
        kernel_cases.rotary_results(RotaryCase(3, 16, 8, 128, dtype=dtype), CPU)
        kernel_cases.norm_results(1, 5120, dtype, CPU)
        kernel_cases.gated_results(1, 17408, dtype, CPU)
    kernel_cases.rounding_results(1, 17408, torch.bfloat16, CPU)
    for counts, dtype in (((1,) * 128, torch.bfloat16), ((128,) * 128, torch.bfloat16), ((64,) * 128, torch.float32)):
        kernel_cases.grouped_results(GroupedCase(counts, 64, 1536, dtype), CPU)
    experts = ExpertConfig(num_experts=128, num_chosen=8, intermediate_size=768, normalizes_shares=True, in_layers=())
    kernel_cases.expert_step_results(16, experts, torch.bfloat16, CPU)
    kernel_cases.rotary_results(RotaryCase(70, 9, 3, 64, dtype=torch.bfloat16), CPU)
    for kv_dtype in (E4M3, E5M2):
        kernel_cases.rotary_results(RotaryCase(3, 16, 8, 128, dtype=torch.bfloat16, kv_dtype=kv_dtype), CPU)


def _attention_cases() -> Iterator[AttentionCase]:
    """One row that decodes in splits and one chunk, then one row that decodes in one piece."""
    for dtype, head_dim, window in (
        (torch.bfloat16, 128, None),
        (torch.bfloat16, 64, 100),
        (torch.float16, 256, None),
        (torch.float32, 128, None),
    ):
        mixed = ((900, 1), (10, 200))
        yield AttentionCase(mixed, 16, head_dim, 2, 5, window, dtype, num_processors=132)
    for dtype, kv_dtype in ((torch.bfloat16, E4M3), (torch.float16, E5M2)):
        yield AttentionCase(((900, 1), (10, 200)), 16, 128, 2, 5, None, dtype, num_processors=132, kv_dtype=kv_dtype)
    yield AttentionCase(((3, 1),), 16, 128, 2, 5, dtype=torch.bfloat16)


def _compile_launch(self: JITFunction[Any], *arguments: object, grid: object, warmup: bool, **named: object) -> None:
    """Takes the place of a launch."""
    options = {name: named.pop(name) for name in _OPTIONS if name in named}
    values = dict(zip(self.arg_names, arguments, strict=False)) | named
    constants = {parameter.name: values[parameter.name] for parameter in self.params if parameter.is_constexpr}
    if "in_float32" in constants:  # which the CPU's tensors have made true
        left = values.get("queries", values.get("x"))
        assert isinstance(left, torch.Tensor)
        constants["in_float32"] = left.dtype == torch.float32
    signature = {name: "constexpr" if name in constants else _type_of(values[name]) for name in self.arg_names}
    for architecture in TARGETS:
        if architecture < 89 and any(kind.startswith("*fp8") for kind in signature.values()):  # see `eight_bits`
            continue
        key = (self.__name__, architecture, *signature.items(), *constants.items(), *options.items())
        if key not in _compiled:
            _compiled.add(key)
            target = GPUTarget("cuda", architecture, 32)
            done = triton.compile(ASTSource(self, signature, constants), target=target, options=options)
            print(self.__name__, architecture, done.metadata.shared, flush=True)


def _type_of(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


if __name__ == "__main__":
    main()
