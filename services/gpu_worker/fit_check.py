"""gpu_worker: whether a model can run here, said without loading it. Prints one JSON object.

    python -m services.gpu_worker.fit_check [--config-only | --machine-only]

A worker's settings are in its environment. With `--config-only` the model's folder holds config.json and no weights
yet: what they will take follows from it. The sizes of weights and KV pages are exact, and the pool is decided by the
code that decides it at a start; what a step takes beside them is an estimate: only running one would measure it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass

import torch

from services.gpu_worker.choices import Choices, UnfitSettingError, choose, is_laid_out
from services.gpu_worker.eight_bits import fp8_forms
from services.gpu_worker.host_limits import available_memory_bytes, num_cores, total_memory_bytes
from services.gpu_worker.integer_weights import rounded
from services.gpu_worker.kv_cache import KvCacheShape
from services.gpu_worker.memory import MemoryState, pool_size
from services.gpu_worker.models.checkpoint_layout import allocate_weights, placements
from services.gpu_worker.models.config import ModelConfig
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.process_set_up import choose_device
from services.gpu_worker.start_up import forms_of
from services.gpu_worker.weights import check_model, grids_in, laid_out_bytes
from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.runtime.capacity import asked_step_tokens
from services.runtime.config import Settings, SettingsError, load_settings
from services.runtime.service import StartError

_USUAL_CHUNK_TOKENS = {"cpu": 512, "cuda": 2048}  # a start measures its own
_STEADY_SHARE = 0.9  # of the free memory: it will be another amount when the advice is followed
_LOGITS_COPIES = 3  # float32: the logits, what sampling makes of them, and a sort of it


@dataclass(frozen=True)
class Machine:
    """What there is to run on. `device_name` is "" without a CUDA device, and then the memory is the host's."""

    torch_version: str
    cuda_version: str
    device_name: str
    num_cores: int
    total_bytes: int
    available_bytes: int


@dataclass(frozen=True)
class Fit:
    """What a model takes, in bytes, and whether that is there; of a shared model (`--tp-size`) the part of rank 0.

    `problem` is why it cannot run, "" when it can, and `remedy` what would help.
    """

    problem: str = ""
    remedy: str = ""
    model_type: str = ""
    dtype: str = ""
    num_weights: int = 0
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0
    activation_bytes: int = 0
    context: int = 0
    pool_tokens: int = 0


def machine(device: torch.device) -> Machine:
    """Looks at the device that a worker would take."""
    if device.type == "cuda":
        available, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
    else:
        available, total, name = available_memory_bytes(), total_memory_bytes(), ""
    return Machine(torch.__version__, torch.version.cuda or "", name, num_cores(), total, available)


def fit(settings: Settings, device: torch.device, host: Machine, is_config_only: bool) -> Fit:
    """Checks a model's files and computes what it takes."""
    try:
        files = open_model(settings.model)
        config = parse_model_config(files) if is_config_only else check_model(files)
    except ModelFileError as error:
        return Fit(problem=str(error), remedy="choose a model of a supported family, or fetch its files again")
    try:
        choices = choose(settings, config, device, 0, max(1, settings.tp_size))
    except UnfitSettingError as error:
        return Fit(problem=str(error), remedy=error.remedy)
    shard, dtype, shape, context = choices.shard, choices.dtype, choices.shape, choices.max_model_len
    sizes = dataclasses.replace(_sizes(settings, choices), context=context)
    eight = fp8_forms(settings, shard.layout, device, lambda: None)
    if eight is not None:
        sizes = dataclasses.replace(sizes, weight_bytes=laid_out_bytes(shard.layout, eight, dtype=dtype))
    elif is_laid_out(settings, device):
        grids = {} if is_config_only else grids_in(files)
        forms = rounded(forms_of(settings), settings, shard.layout)
        sizes = dataclasses.replace(sizes, weight_bytes=laid_out_bytes(shard.layout, forms, grids))
    # On CUDA each worker, and each rank of one, has a device of its own.
    num_sharing = settings.dp_size * shard.size if device.type == "cpu" else 1
    memory = MemoryState(
        total=host.total_bytes,
        available=max(0, host.available_bytes - num_sharing * sizes.weight_bytes),
        weights=sizes.weight_bytes,
        activations=sizes.activation_bytes,
        is_cpu=device.type == "cpu",
        num_ranks=shard.size,
    )
    wanted = num_sharing * (sizes.weight_bytes + sizes.activation_bytes)
    if wanted > host.available_bytes:
        of_whom = f" of {num_sharing} {'workers' if shard.size == 1 else 'processes'}" if num_sharing > 1 else ""
        problem = (
            f"weights and a step{of_whom} need {wanted / 1e9:.2f} GB, {host.available_bytes / 1e9:.2f} GB are free"
        )
        return dataclasses.replace(sizes, problem=problem, remedy=_for_weights(sizes, host))
    try:
        num_pages = pool_size(memory, shape, settings, context).num_pages
    except StartError as error:
        return dataclasses.replace(sizes, problem=str(error), remedy=_for_pool(settings, memory, shape))
    return dataclasses.replace(sizes, pool_tokens=num_pages * settings.page_size)


def _for_weights(sizes: Fit, host: Machine) -> str:
    """What helps where weights and a step are too large; smaller steps where the weights alone are not."""
    smaller = "choose a smaller model, or another --dtype or --device, or free memory"
    if sizes.weight_bytes > host.available_bytes:
        return smaller
    return f"set a lower --chunked-prefill-size or --max-running-requests, {smaller}"


def _for_pool(settings: Settings, memory: MemoryState, shape: KvCacheShape) -> str:
    """What helps where the pool has no room: less of it where so much was asked for."""
    most_pages = _STEADY_SHARE * memory.most_for_pool // shape.bytes_per_page
    most_tokens = int(most_pages) * shape.page_size
    if settings.kv_cache_tokens and most_tokens:
        return f"set --kv-cache-tokens {most_tokens} or less, or leave it out"
    smaller = "free memory, or choose a smaller model, a lower --max-model-len, or another --dtype or --device"
    return smaller if settings.kv_cache_tokens else f"raise --mem-fraction-static, {smaller}"


def _sizes(settings: Settings, choices: Choices) -> Fit:
    shard, dtype = choices.shard, choices.dtype
    weights = allocate_weights(shard.layout, dtype, torch.device("meta"))
    num_weights = sum(item.target.numel() for item in placements(shard.layout, weights))
    usual_chunk = _USUAL_CHUNK_TOKENS[choices.attention.device.type]
    num_step_tokens = asked_step_tokens(settings, usual_chunk, choices.max_model_len)
    return Fit(
        model_type=shard.config.model_type,
        dtype=str(dtype).removeprefix("torch."),
        num_weights=num_weights,
        weight_bytes=num_weights * dtype.itemsize,
        kv_bytes_per_token=choices.shape.bytes_per_page // settings.page_size,
        activation_bytes=activation_bytes(settings, shard.config, dtype, num_step_tokens),
    )


def activation_bytes(settings: Settings, config: ModelConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """About what the largest step takes and gives back: one layer's intermediate results, and its rows' logits."""
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    width = 3 * config.intermediate_size
    if config.experts is not None:  # a line for each expert that a token goes through, in, within and out, and joined
        width = max(width, config.experts.num_chosen * (3 * config.experts.intermediate_size + 3 * config.hidden_size))
    per_token = (4 * config.hidden_size + 2 * attention + width) * dtype.itemsize
    rows = min(num_tokens, settings.max_running_requests)
    return num_tokens * per_token + _LOGITS_COPIES * 4 * rows * config.vocab_size


def main(arguments: list[str]) -> int:
    """Prints what was found; status 1 when the settings cannot be used."""
    try:
        settings = load_settings([])
        device = choose_device(settings)
    except (SettingsError, StartError) as error:
        print(json.dumps({"error": str(error)}))
        return 1
    host = machine(device)
    found: dict[str, object] = {"machine": dataclasses.asdict(host)}
    if "--machine-only" not in arguments:
        found["fit"] = dataclasses.asdict(fit(settings, device, host, "--config-only" in arguments))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
