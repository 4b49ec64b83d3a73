"""A model of random weights: as large as the real one, finite, the same at every start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.random_checkpoints import FAMILIES, Shape, write_config
from services.gpu_worker.attention import attention_for
from services.gpu_worker.dummy_weights import dummy_model
from services.gpu_worker.kv_cache import KvCache, KvCacheShape
from services.gpu_worker.model_runner import ModelRunner
from services.gpu_worker.models.checkpoint_layout import placements
from services.model_files.source import open_model
from services.runtime.config import Settings
from tests.sockets import Sockets
from tests.unit.gpu_worker.step_bench import CPU
from tests.unit.gpu_worker.worker_peer import new_requests, serving, worker_settings


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_finite_and_the_same_every_time(family: str, tmp_path: Path) -> None:
    files = open_model(write_config(tmp_path / family, family, Shape()))
    logits = []
    for _ in range(2):
        model = dummy_model(files, CPU, torch.float32)
        config = model.config
        shape = KvCacheShape(config.num_layers, config.num_kv_heads, config.head_dim, 16, torch.float32)
        runner = ModelRunner(config, model.weights, KvCache(shape, 0, CPU), attention_for(CPU, torch.float32))
        logits.append(runner.forward(runner.dummy_inputs(7, 3)))
    assert logits[0].isfinite().all()
    assert logits[0].std() > 1e-3
    assert torch.equal(logits[0], logits[1])


def test_every_tensor_of_a_checkpoint_is_counted(tmp_path: Path) -> None:
    model = dummy_model(open_model(write_config(tmp_path / "model", "qwen3", Shape())), CPU, torch.bfloat16)
    targets = [item.target for item in placements(model.config, model.weights)]
    assert model.report.num_bytes_placed == sum(target.numel() * 2 for target in targets)


def test_a_worker_serves_a_folder_without_weights(tmp_path: Path, net: Sockets) -> None:
    folder = write_config(tmp_path / "model", "llama", Shape())
    settings: Settings = replace(worker_settings(folder, net.directory), load_format="dummy")
    with serving(settings, net) as (scheduler, _):
        requests = new_requests()[:1]
        scheduler.generate(scheduler.new_writer(), requests)
    assert requests[0].output
