"""A real service with one fault put in: `python -m tests.faults.faulty_service ROLE`, settings as for `services.ROLE`.

The fault strikes requests that carry a mark and no others:

    tokenizer     raises while it encodes a text that holds TEXT_MARK
    scheduler     raises when a request is submitted whose prompt holds SUBMIT_MARK
    gpu_worker    raises in a step with a row whose prompt begins with RAISE_MARK, from output index 5 on;
                  computes no numbers for a row whose prompt begins with a mark of NAN_MARKS, from that output index on
    detokenizer   raises at output index DECODE_FROM of an answer that has the stop string STOP_MARK
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from unittest import mock

from services.runtime.service import run_service
from services.wire.answers import DecodeOpen
from services.wire.columns import unpack_int32
from services.wire.finish import Finish
from services.wire.members import Role
from services.wire.requests import Submit
from services.wire.steps import NewRow

TEXT_MARK = "the tokenizer raises here"
SUBMIT_MARK = 40001
RAISE_MARK, RAISE_FROM = 40002, 5
NAN_MARKS = {40003: 3, 40004: 0}
STOP_MARK, DECODE_FROM = "the detokenizer raises here", 4


class InjectedError(Exception):
    """The fault."""


def run_tokenizer() -> None:
    from tokenizers import Tokenizer

    from services.tokenizer import text_encoder
    from services.tokenizer.service import main

    encode = text_encoder._encode

    def faulty_encode(tokenizer: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if TEXT_MARK in text:
            raise InjectedError("encoding")
        return encode(tokenizer, text, add_special_tokens)

    mock.patch.object(text_encoder, "_encode", faulty_encode).start()
    run_service(Role.TOKENIZER, main)


def run_scheduler() -> None:
    from services.scheduler.core import Core
    from services.scheduler.request import Request
    from services.scheduler.service import main

    submit_unharmed = Core.submit

    def faulty_submit(core: Core, submit: Submit, lane: bytes = b"") -> Request:
        if SUBMIT_MARK in unpack_int32(submit.prompt_token_ids):
            raise InjectedError("submitting")
        return submit_unharmed(core, submit, lane)

    mock.patch.object(Core, "submit", faulty_submit).start()
    run_service(Role.SCHEDULER, main)


def run_gpu_worker() -> None:
    from torch import Tensor, nan

    from services.gpu_worker.held_rows import HeldRow, HeldRows
    from services.gpu_worker.model_runner import ModelRunner
    from services.gpu_worker.service import main
    from services.gpu_worker.step_inputs import StepInputs

    add, compute = HeldRows.add, ModelRunner.hidden
    marks: dict[int, tuple[int, int]] = {}  # first page of a row -> its first token, length of its prompt

    def noting_add(rows: HeldRows, new: NewRow) -> HeldRow:
        marks[unpack_int32(new.page_ids)[0]] = unpack_int32(new.token_ids)[0], new.num_prompt_tokens
        return add(rows, new)

    def faulty_hidden(runner: ModelRunner, inputs: StepInputs) -> Tensor:
        first_pages = inputs.page_table[:, 0].tolist()
        poisoned = []
        for place, (page, length) in enumerate(zip(first_pages, inputs.context_lengths, strict=True)):
            mark, num_prompt = marks.get(page, (0, 0))
            output_index = length - num_prompt
            if mark == RAISE_MARK and output_index >= RAISE_FROM:
                raise InjectedError("computing")
            if mark in NAN_MARKS and output_index >= NAN_MARKS[mark]:
                poisoned.append(place)
        hidden = compute(runner, inputs)
        if poisoned:
            hidden[inputs.sample_indices[poisoned]] = nan
        return hidden

    mock.patch.object(HeldRows, "add", noting_add).start()
    mock.patch.object(ModelRunner, "hidden", faulty_hidden).start()
    run_service(Role.GPU_WORKER, main)


def run_detokenizer() -> None:
    from services.detokenizer.answer import AnswerChunk, AnswerDecoder
    from services.detokenizer.decoders import Decoders
    from services.detokenizer.service import main

    open_unharmed, advance, take_next = Decoders.open, AnswerDecoder.advance, AnswerDecoder.take_next
    marked: set[int] = set()

    def noting_open(decoders: Decoders, message: DecodeOpen, unix_s: float = 0.0) -> None:
        open_unharmed(decoders, message, unix_s)
        if STOP_MARK in message.text.stop:
            marked.add(id(decoders._open[message.request_id].decoder))

    def raise_if_marked(decoder: AnswerDecoder, index: int) -> None:
        if id(decoder) in marked and index >= DECODE_FROM:
            marked.discard(id(decoder))  # the next one may lie at the same place
            raise InjectedError("decoding")

    def faulty_advance(
        decoder: AnswerDecoder, first_index: int, token_ids: Sequence[int], finish: Finish = Finish.NONE
    ) -> AnswerChunk | None:
        raise_if_marked(decoder, first_index)
        return advance(decoder, first_index, token_ids, finish)

    def faulty_take_next(decoder: AnswerDecoder, token_id: int) -> str | AnswerChunk:
        raise_if_marked(decoder, decoder.next_index)
        return take_next(decoder, token_id)

    mock.patch.object(Decoders, "open", noting_open).start()
    mock.patch.object(AnswerDecoder, "advance", faulty_advance).start()
    mock.patch.object(AnswerDecoder, "take_next", faulty_take_next).start()
    run_service(Role.DETOKENIZER, main)


if __name__ == "__main__":
    {
        Role.TOKENIZER: run_tokenizer,
        Role.SCHEDULER: run_scheduler,
        Role.GPU_WORKER: run_gpu_worker,
        Role.DETOKENIZER: run_detokenizer,
    }[Role(sys.argv.pop())]()
