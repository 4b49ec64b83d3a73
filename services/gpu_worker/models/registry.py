"""gpu_worker: the model families there are, by the name that config.json gives them."""

from __future__ import annotations

from services.gpu_worker.models.family import Family
from services.gpu_worker.models.llama import LLAMA
from services.gpu_worker.models.mistral import MISTRAL
from services.gpu_worker.models.qwen2 import QWEN2
from services.gpu_worker.models.qwen3 import QWEN3
from services.gpu_worker.models.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE)}
