"""The real demo model: the fixed prompts of the failure bank, and its logits against transformers'."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from services.gpu_worker.attention import attention_for
from services.gpu_worker.attention.reference import ReferenceAttention
from services.gpu_worker.weights import LoadedModel, load_model
from services.model_files.source import open_model
from tests.unit.gpu_worker.step_driver import StepDriver

CPU = torch.device("cpu")

# "1, 2, 3, 4,"; "hello world" four times and " hello"; a waving hand and a globe, five times; a smile, eight times.
NUM = [33, 28, 216, 34, 28, 216, 35, 28, 216, 36, 28]
HELLO = [28120, *[905, 33662] * 4]
WAVE = [10813, 235, 229, 10813, 230, 231] * 5
BAD = [10813, 38887] * 8
SYSTEM = [2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182]
CHAT_HI = [1, 9690, 198, *SYSTEM, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
# "The capital of France is", the start of a Python function, and a Chinese sentence.
OTHERS = (
    [504, 3575, 282, 4649, 314],
    [1604, 3987, 46477, 24, 94, 727, 472, 585, 304, 2067],
    [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230, 19076, 15076, 228, 18614, 119],
)
NUM_CONTINUED = [216, 37, 28, 216, 38, 28, 216, 39, 28, 216, 40, 28, 216, 41, 28, 216, 33, 32, 28, 216]
CONTINUED = [(NUM, NUM_CONTINUED), (HELLO, [905, 33662] * 8), (WAVE, WAVE[:6] * 3), (BAD, [10813, 230] * 9)]


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> LoadedModel:
    return load_model(open_model(smollm2_path), CPU)


def new_driver(model: LoadedModel, page_size: int = 16) -> StepDriver:
    return StepDriver(model, attention_for(CPU, torch.float32), page_size, 1024)


@pytest.mark.parametrize(("prompt", "continued"), CONTINUED, ids=["F-NUM", "F-HELLO", "F-WAVE", "F-BAD"])
def test_greedy_continuations(model: LoadedModel, prompt: list[int], continued: list[int]) -> None:
    assert new_driver(model).greedy(prompt, len(continued)) == continued


def test_wgt_01_wgt_06_tied_embeddings_and_theta_of_the_real_model(model: LoadedModel) -> None:
    assert model.weights.head.weight is model.weights.embedding
    assert model.config.rotary.inverse_frequencies[16] == pytest.approx(100000.0**-0.5)


def test_sch_12_log_probabilities_of_a_prompt(model: LoadedModel) -> None:
    driver = new_driver(model)
    row = driver.add(NUM)
    driver.step((row, len(NUM)))
    log_probabilities = row.all_logits().log_softmax(-1)
    of_prompt = [float(log_probabilities[at, token]) for at, token in enumerate(NUM[1:])]
    expected = [-2.035, -0.632, -1.076, -1.839, -0.099, -0.440, -0.209, -0.077, -0.116, -0.103]
    assert of_prompt == pytest.approx(expected, abs=0.02)


def test_smp_15_best_log_probabilities(model: LoadedModel) -> None:
    driver = new_driver(model)
    row = driver.add(NUM)
    driver.step((row, len(NUM)))
    best = row.logits[-1][-1].log_softmax(-1).topk(5).values
    assert best.tolist() == pytest.approx([-0.077, -3.577, -5.007, -5.377, -5.411], abs=2e-3)


@pytest.mark.parametrize("page_size", [1, 16])
def test_sch_02_sch_13_chunks_a_cached_prefix_and_neighbours_change_nothing(model: LoadedModel, page_size: int) -> None:
    reference = StepDriver(model, ReferenceAttention(), 16, 1024)
    driver = new_driver(model, page_size)
    alone, chunked, neighbour = reference.add(CHAT_HI), driver.add(CHAT_HI), driver.add(WAVE)
    reference.step((alone, len(CHAT_HI)))
    driver.step((chunked, 9))
    driver.step((neighbour, 20), (chunked, 1))
    driver.step((neighbour, 1), (chunked, len(CHAT_HI) - 11))
    driver.step((chunked, 1), (neighbour, 5))
    cached = driver.add(CHAT_HI, prefix_of=chunked)
    assert cached.num_computed_tokens == 30 // page_size * page_size
    driver.step((cached, len(CHAT_HI) - cached.num_computed_tokens))
    expected = alone.all_logits()
    assert float((chunked.all_logits() - expected).abs().max()) < 1e-3
    assert float((cached.logits[-1][-1] - expected[-1]).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_wgt_09_the_text_is_the_same_in_half_precision(smollm2_path: Path, dtype: torch.dtype) -> None:
    model = load_model(open_model(smollm2_path), CPU, dtype)
    driver = StepDriver(model, attention_for(CPU, dtype), 16, 64)
    assert driver.greedy(NUM, len(NUM_CONTINUED)) == NUM_CONTINUED


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore")
def test_logits_of_transformers(model: LoadedModel, smollm2_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32
    ).eval()
    for prompt in (NUM, HELLO, WAVE, BAD, CHAT_HI, *OTHERS):
        with torch.inference_mode():
            expected = theirs(torch.tensor([prompt])).logits[0]
        for attention in (ReferenceAttention(), attention_for(CPU, torch.float32)):
            driver = StepDriver(model, attention, 16, 64)
            row = driver.add(prompt)
            driver.step((row, len(prompt) - 2))
            driver.step((row, 1))
            driver.step((row, 1))
            assert float((row.all_logits() - expected).abs().max()) < 1e-3
