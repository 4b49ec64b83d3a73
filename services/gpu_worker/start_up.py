"""gpu_worker: from settings to a model that runs: device, weights, warm-up, memory, pool. Each step leaves a log line.

Everything that can be wrong with the settings, the files or the memory is found here, before the first request, and
told in one line (`StartError`).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from services.gpu_worker.attention import attention_named
from services.gpu_worker.attention.backend import AttentionBackend
from services.gpu_worker.attention.fastest import AttentionTask
from services.gpu_worker.choices import Choices, choose, is_laid_out, product_dtype
from services.gpu_worker.cpu_loops import loops_problem
from services.gpu_worker.decode_graphs import GraphLimits
from services.gpu_worker.dummy_weights import dummy_model
from services.gpu_worker.eight_bits import fp8_forms
from services.gpu_worker.fused_operators import operators_for
from services.gpu_worker.grammar_compiler import GrammarCompiler
from services.gpu_worker.grammar_process import ChildSpec
from services.gpu_worker.grammar_rows import GrammarRows
from services.gpu_worker.graph_warm_up import graph_device, record_decode_layers, record_graphs
from services.gpu_worker.held_rows import WorkerSizes
from services.gpu_worker.host_limits import stored_bytes_read
from services.gpu_worker.integer_weights import rounded
from services.gpu_worker.kernels import triton_problem, with_fast_experts
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.largest_step import run_largest_step
from services.gpu_worker.load_progress import LoadProgress
from services.gpu_worker.memory import MemoryState, measure_memory, pool_size, shortage
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.operators import Operators
from services.gpu_worker.models.parse_config import parse_model_config
from services.gpu_worker.parallel.agreement import agreed_pages, facts_of
from services.gpu_worker.parallel.group import RankGroup
from services.gpu_worker.parallel.shard_runner import LeadingRunner, ShardRunner
from services.gpu_worker.parallel.shards import split_model
from services.gpu_worker.process_set_up import set_up_process
from services.gpu_worker.products.forms import CpuForms, Measuring
from services.gpu_worker.roofline import Loaded, Roofline, measure_machine
from services.gpu_worker.start_stages import StartStage, StartStages
from services.gpu_worker.step_cost import ModelCost
from services.gpu_worker.step_launcher import StepLauncher
from services.gpu_worker.warm_up import WarmUp, chunk_limit_s, warm_up
from services.gpu_worker.weights import RunnableModel, load_laid_out, load_model
from services.gpu_worker.worker_state import WorkerState
from services.model_files.digest import model_digest
from services.model_files.errors import ModelFileError
from services.model_files.source import ModelFiles, open_model
from services.runtime.capacity import asked_step_tokens
from services.runtime.config import Settings
from services.runtime.service import StartError
from services.wire.members import WorkerCard

_MAX_MEASURED_S = 1.0  # the largest step may take so long while its memory is measured on a CPU

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReadyWorker:
    """What the service runs, and what it tells of it; `start_s` are the seconds of each stage of its start."""

    launcher: StepLauncher
    state: WorkerState
    grammars: GrammarRows
    card: WorkerCard
    roofline: Roofline
    kv_bytes_per_token: int
    num_pool_bytes: int
    start_s: Mapping[StartStage, float]


@dataclass(frozen=True, slots=True)
class ModelParts:
    """A model and what it runs with, before there is a pool for it.

    Attributes:
        model: its weights, or this rank's part of them.
        loaded: how they came.
        digest: tells its files from another's.
        device: where it is.
        attention, operators: how it is computed.
        shape: of a KV page.
        max_model_len: most tokens of a request.
        group: the ranks that share the model; None: this process has all of it.
    """

    model: RunnableModel
    loaded: Loaded
    digest: str
    device: torch.device
    attention: AttentionBackend
    operators: Operators
    shape: KvCacheShape
    max_model_len: int
    group: RankGroup | None

    def runner(self, num_pages: int) -> ModelRunner:
        """A runner with a pool of its own; StartError where it cannot be allocated."""
        model, kv_cache = self.model, _allocate(self.shape, num_pages, self.device)
        if self.group is None:
            return ModelRunner(model.config, model.weights, kv_cache, self.attention, self.operators)
        kind = LeadingRunner if self.group.is_leading else ShardRunner
        return kind(self.group, model.config, model.weights, kv_cache, self.attention, self.operators)


def start_up(
    settings: Settings,
    pump: Callable[[], None],
    group: RankGroup | None = None,
    stages: StartStages | None = None,
) -> ReadyWorker:
    """Makes a worker ready; of a group, rank 0.

    Args:
        settings: of the process; `model` is a path here.
        pump: called all the time while it lasts, to say that this process lives; may raise to give up.
        group: the ranks that share the model.
        stages: the clock of this start, if it has begun to run.

    Raises:
        StartError: settings, files or memory are at fault; one line that names what.
        RankLostError: another rank is gone.
    """
    with stages or StartStages() as clock:
        worker = _made_ready(settings, pump, group, clock)
        clock.log()
    return worker


def _made_ready(
    settings: Settings, pump: Callable[[], None], group: RankGroup | None, stages: StartStages
) -> ReadyWorker:
    parts = load_parts(settings, pump, group, stages)
    device, shape, max_model_len = parts.device, parts.shape, parts.max_model_len
    config, weights = parts.model.config, parts.model.weights
    dtype = weights.embedding.dtype
    bare = parts.runner(0)
    with stages.within(StartStage.LIMITS):
        machine = measure_machine(device, device_name(device), product_dtype(settings, device, dtype))
    with stages.within(StartStage.WARM_UP):
        measured = warm_up(bare, pump, max_model_len, max(0, settings.chunked_prefill_size))
        logger.info(
            "warm-up: %d tokens in %.0f ms (%.0f tokens/s), one token in %.1f ms",
            measured.chunk_tokens, 1000 * measured.chunk_s, measured.tokens_per_s, 1000 * measured.decode_s,
        )  # fmt: skip
        memory = _measure(settings, bare, measured, max_model_len, weights.num_bytes)
    pump()
    num_pages = _num_pages(parts, memory, settings)
    with stages.within(StartStage.RECORDING):
        runner = parts.runner(num_pages)
    sizes = WorkerSizes(settings.max_running_requests, max_model_len, config.vocab_size, settings.page_size, num_pages)
    compiler = GrammarCompiler(
        ChildSpec(settings.model, config.vocab_size, settings.grammar_timeout_s, settings.grammar_memory_mb)
    )
    grammars = GrammarRows(compiler, config.vocab_size, settings.jump_ahead)
    state = WorkerState(sizes, device, grammars)
    card = WorkerCard(
        vocab_size=config.vocab_size,
        logits_width=config.vocab_size,
        page_size=settings.page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        max_rows=settings.max_running_requests,
        chunk_tokens=measured.chunk_tokens,
        chunk_ms=1000 * measured.chunk_s,
        model_digest=parts.digest,
        chunk_context=measured.chunk_context,
        chunk_limit_ms=1000 * chunk_limit_s(device),
    )
    with stages.within(StartStage.RECORDING):
        if graphs := graph_device(settings, runner):
            record_graphs(runner, GraphLimits(settings.max_running_requests, max_model_len), graphs, pump)
        if group is not None:
            group.serve()
        elif device.type == "cpu":
            record_decode_layers(runner, GraphLimits(settings.max_running_requests, max_model_len), pump)
    launcher = StepLauncher(runner, state)
    kv_bytes_per_token = shape.bytes_per_page // shape.page_size
    own = replace(config, vocab_size=len(weights.embedding))  # of a shared model what this rank computes
    roofline = Roofline(machine, parts.loaded, ModelCost(own, weights, kv_bytes_per_token))
    num_pool_bytes = runner.kv_cache.num_bytes
    return ReadyWorker(launcher, state, grammars, card, roofline, kv_bytes_per_token, num_pool_bytes, stages.seconds)


def load_parts(
    settings: Settings, pump: Callable[[], None], group: RankGroup | None, stages: StartStages
) -> ModelParts:
    """Loads a model, or this rank's part of it, and agrees with the other ranks that they have the same one."""
    device = set_up_process(settings) if group is None else group.device
    if device.type == "cpu":
        stages.watch_compilation()
    rank, size = (0, 1) if group is None else (group.place.rank, group.place.size)
    try:
        files = open_model(settings.model)
        choices = choose(settings, parse_model_config(files), device, rank, size)
        with stages.within(StartStage.WEIGHTS):
            model, loaded = _load(settings, files, choices, pump, stages)
            digest = model_digest(files)
    except ModelFileError as error:
        raise StartError(str(error)) from error
    if group is not None:
        group.agree(facts_of(settings, digest, device, choices.dtype), pump)
    with stages.within(StartStage.FORMS):
        weights = with_fast_experts(model.weights, device)
        attention = _attention(settings, choices.attention)
    return ModelParts(
        model=replace(model, weights=weights),
        loaded=loaded,
        digest=digest,
        device=device,
        attention=attention,
        operators=operators_for(device),
        shape=choices.shape,
        max_model_len=choices.max_model_len,
        group=group,
    )


def _num_pages(parts: ModelParts, memory: MemoryState, settings: Settings) -> int:
    """Of the pool; a warning where the longest request does not fit in."""
    if parts.group is not None:
        num_pages = agreed_pages(parts.group, memory, parts.shape, settings, parts.max_model_len)
    else:
        pool = pool_size(memory, parts.shape, settings, parts.max_model_len)
        for line in pool.lines:
            logger.info(line)
        num_pages = pool.num_pages
    if short := shortage(num_pages * settings.page_size, settings, parts.max_model_len):
        logger.warning(short)
    return num_pages


def forms_of(
    settings: Settings, pump: Callable[[], None] = lambda: None, measuring: Measuring = nullcontext
) -> CpuForms:
    """What becomes of matrices that are laid out; see `CpuForms`."""
    return CpuForms(settings.numerics == "exact", int(settings.cpu_copies_gb * 1e9), pump, measuring)


def _load(
    settings: Settings, files: ModelFiles, choices: Choices, pump: Callable[[], None], stages: StartStages
) -> tuple[RunnableModel, Loaded]:
    """The model or this rank's part of it, and how it came."""
    device, shard = choices.attention.device, choices.shard
    split = functools.partial(split_model, rank=shard.rank, size=shard.size)
    stored = stored_bytes_read()
    forms = rounded(forms_of(settings, pump, lambda: stages.within(StartStage.FORMS)), settings, shard.layout, pump)
    eight = fp8_forms(settings, shard.layout, device, pump)
    try:
        with LoadProgress(files.path.name, pump) as progress:
            if settings.load_format == "dummy":
                logger.warning("--load-format dummy: random weights, answers mean nothing")
                plain = dummy_model(files, device, choices.dtype, split)
                weights = plain.weights if eight is None else eight.of_all(plain.weights)
                model = RunnableModel(plain.config, weights, plain.report)
            elif eight is not None:
                model = load_laid_out(files, eight, progress, (torch.bfloat16, device), split)
            elif is_laid_out(settings, device):
                model = load_laid_out(files, forms, progress, split=split)
            else:
                plain = load_model(files, device, choices.dtype, progress, split)
                model = RunnableModel(plain.config, plain.weights, plain.report)
    except torch.OutOfMemoryError as error:
        raise StartError(f"{settings.model}: the weights do not fit on {device_name(device)}") from error
    loaded = Loaded(model.report, None if stored is None else (stored_bytes_read() or 0) - stored)
    _log_load(files.path, model, loaded, device)
    if eight is not None:
        logger.info("quantization fp8: %s", eight.description)
    elif is_laid_out(settings, device) and settings.load_format != "dummy":
        logger.info("numerics %s: %s", settings.numerics, forms.description)
    if device.type == "cpu" and (problem := loops_problem()):
        logger.warning("compiled loops do not run here, steps take longer: %s", problem)
    return model, loaded


def _log_load(path: Path, model: RunnableModel, loaded: Loaded, device: torch.device) -> None:
    config, report, dtype = model.config, model.report, model.weights.embedding.dtype
    logger.info(
        "model %s: %s, %.1f M weights, %.1f MB in memory, activations in %s on %s", path.name, config.model_type,
        report.num_bytes_placed / dtype.itemsize / 1e6, model.weights.num_bytes / 1e6,
        str(dtype).removeprefix("torch."), device_name(device),
    )  # fmt: skip
    logger.info(
        "weights from %s: %.1f MB in %.2f s (disk to memory %.2f GB/s%s, decoding %.2f s, memory to device %.2f GB/s)",
        path, report.num_bytes_read / 1e6, report.total_s, report.disk_gb_per_s, loaded.origin, report.decode_s,
        report.device_gb_per_s,
    )  # fmt: skip


def _attention(settings: Settings, task: AttentionTask) -> AttentionBackend:
    name = settings.attention_backend
    attention = attention_named(name, task)
    if task.device.type == "cuda" and name == "auto" and (problem := triton_problem()):
        logger.warning("CUDA kernels: none of our own, steps will be slow: %s", problem)
    logger.info("attention: %s, %d CPU threads", type(attention).__name__, torch.get_num_threads())
    return attention


def _measure(
    settings: Settings, runner: ModelRunner, measured: WarmUp, max_model_len: int, weight_bytes: int
) -> MemoryState:
    """Runs the largest step, or on a slow CPU as much of it as runs in a second, and scales what it took."""
    device = runner.kv_cache.keys.device
    budget = asked_step_tokens(settings, measured.chunk_tokens, max_model_len)
    most_tokens = int(measured.tokens_per_s * _MAX_MEASURED_S) if device.type == "cpu" else budget
    num_tokens = max(1, min(budget, most_tokens))
    num_verified = 0 if settings.speculation == "off" else settings.speculation_step_tokens
    num_rows = max(1, min(num_tokens, (settings.max_running_requests + num_verified) * num_tokens // budget))
    memory = measure_memory(device, weight_bytes, lambda: run_largest_step(runner, num_tokens, num_rows))
    logger.info("largest step: %d tokens, measured with %d in %d rows", budget, num_tokens, num_rows)
    return memory.with_activations(memory.activations * budget // num_tokens)


def _allocate(shape: KvCacheShape, num_pages: int, device: torch.device) -> KvCache:
    try:
        return KvCache(shape, num_pages, device)
    except (RuntimeError, OSError) as error:  # of the device, of the host
        num_bytes = (num_pages + 1) * shape.bytes_per_page
        raise StartError(f"a KV pool of {num_bytes / 2**20:.0f} MiB cannot be allocated: {error}") from error


def device_name(device: torch.device) -> str:
    """What people call a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
