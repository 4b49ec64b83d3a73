"""One example of every message, with fields that differ from each other. Their bytes are golden: `golden.txt`."""

from __future__ import annotations

from pathlib import Path

from services.wire.answers import DecodeFailed, DecodeOpen, HopReport, StopFound, TextChunks, TokensProduced
from services.wire.codec import encode
from services.wire.columns import pack_float32, pack_int32, pack_request_ids
from services.wire.controls import Control, ControlAction, ControlDone
from services.wire.finish import Finish
from services.wire.members import (
    Goodbye,
    HandshakeRefused,
    Heartbeat,
    Hello,
    Member,
    MemberTelemetry,
    Role,
    Roster,
    State,
    Telemetry,
    Welcome,
    WorkerCard,
)
from services.wire.messages import PROTOCOL_VERSION
from services.wire.request_params import (
    Grammar,
    GrammarKind,
    LogitRules,
    PromptParams,
    SamplingParams,
    Task,
    TextParams,
)
from services.wire.requests import Abort, Acknowledge, Admitted, Load, Refused, Resend, Submit
from services.wire.samples import pack_samples
from services.wire.steps import CompileGrammar, Embedding, GrammarCompiled, NewRow, PromptLogprobs, StepPlan, StepResult

GOLDEN_FILE = Path(__file__).parent / "golden.txt"

ID_A = bytes(range(16))
ID_B = bytes(range(240, 256))
IDS = pack_request_ids([ID_A, ID_B])
RULES = LogitRules(
    frequency_penalty=-0.5, presence_penalty=0.25, repetition_penalty=1.1, min_tokens=5,
    stop_token_ids=pack_int32([0, 2]), bias_ids=pack_int32([7, 8]), biases=pack_float32([-100.0, 1.5]),
    allowed_token_ids=pack_int32([7, 9]),
    bad_word_counts=pack_int32([2, 1]), bad_word_ids=pack_int32([3, 4, 5]),
)  # fmt: skip
GRAMMAR = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","enum":["是","no"]}')
SAMPLING = SamplingParams(
    temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=-(2**63), choice=3, rules=RULES,
    grammar=GRAMMAR, num_logprobs=1,
)  # fmt: skip
PLAIN = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=7, choice=0)
PROMPT = PromptParams(Task.EMBED_LAST, 0, 6)
PROMPT_LOGPROBS = PromptLogprobs(ID_A, 1, 6, pack_int32([1, 2]), pack_int32([21, 22, 23]),
                                 pack_float32([-0.5, -1.5, float("-inf")]))  # fmt: skip
EMBEDDING = Embedding(ID_B, 2, pack_float32([0.25, -3.0]))
TEXT = TextParams(stop=("\n\n", "停", "👋"), include_stop_str_in_output=True, skip_special_tokens=False, min_tokens=5)
CARD = WorkerCard(
    vocab_size=49152, logits_width=49280, page_size=16, num_pages=1024, max_model_len=8192, max_rows=256,
    chunk_tokens=512, chunk_ms=287.5, held_request_ids=IDS, held_attempts=pack_int32([0, 2]),
    held_indexes=pack_int32([17, 300]), model_digest="0f1e2d", chunk_context=860, chunk_limit_ms=300.0,
)  # fmt: skip

EXAMPLES: list[object] = [
    Hello(PROTOCOL_VERSION, Role.GPU_WORKER, "w-1", 2**64 - 1, "", State.STARTING, CARD),
    Welcome(PROTOCOL_VERSION, 0x0123456789ABCDEF),
    HandshakeRefused(PROTOCOL_VERSION, "页大小 differs"),
    Roster(7, (Member(Role.TOKENIZER, "t-1", 1, "ipc:///run/t.sock", State.READY),
               Member(Role.DETOKENIZER, "d-1", 2, "tcp://10.0.0.2:5000", State.DRAINING))),
    Heartbeat(42, State.READY, 2**62, pack_samples({"gauge": 1.5, "计数": 3.0})),
    Goodbye(43),
    Telemetry((MemberTelemetry(Role.SCHEDULER, "s", 9, State.READY, 120, 12345, pack_samples({"steps": 7.0}), 10500),)),
    Submit(ID_A, 1, pack_int32([1, 49151]), pack_int32([5]), SAMPLING, TEXT, 128, pack_int32([0, 2]), ID_B, "租户",
           b"\x00salt", -3, 30_000, PROMPT, pack_int32([2])),
    Admitted(ID_A, 1),
    Refused(ID_A, 1, 503, "queue_full", "the queue is full", "max_tokens", 2),
    Abort(IDS, pack_int32([1, 0])),
    Load(State.READY, 3, 1024, 16, 900, 1024, 8192, 1, 25, 1040),
    Acknowledge(IDS, pack_int32([1, 0]), pack_int32([17, 18])),
    Resend(IDS, pack_int32([1, 0]), pack_int32([0, 9])),
    Control(4, ControlAction.ABORT_GROUP, ID_B),
    ControlDone(4, 2),
    PROMPT_LOGPROBS,
    DecodeOpen(ID_A, 1, b"tokenizer/t-1/0000000000000001", TEXT),
    TokensProduced(IDS, pack_int32([1, 0]), pack_int32([4, 9]), pack_int32([2, 0]), pack_int32([11, 12]),
                   bytes([Finish.NONE, Finish.LENGTH]), pack_int32([32, 0]), pack_int32([2, 0]), pack_int32([11, 14]),
                   pack_float32([-0.25, -2.0])),
    StopFound(IDS, pack_int32([1, 0]), pack_int32([6, 7])),
    DecodeFailed(IDS, pack_int32([1, 0])),
    TextChunks(IDS, pack_int32([1, 0]), pack_int32([4, 9]), pack_int32([2, 1]), pack_int32([11, 12, 13]),
               pack_int32([20, 40]), ("héllo 世界 👋", ""), bytes([Finish.NONE, Finish.STOP_STRING]),
               pack_int32([0, 10]), pack_int32([32, 0]), ("停",), pack_int32([1, 0, 1]), pack_int32([11, 13]),
               pack_float32([-0.25, -2.0])),
    EMBEDDING,
    HopReport(ID_A, 1, Role.SCHEDULER, "s-1", 1_790_000_000_000_000, 1500, 90_000, {"steps": 12.0, "页": 3.0}),
    StepPlan(42, 1000, pack_int32([3]), (NewRow(1, ID_A, 0, pack_int32([1, 2, 3]), 2, pack_int32([9]), PLAIN, PROMPT),),
             pack_int32([1, 5]), pack_int32([1, 2]), pack_int32([10, 11, 12]), pack_int32([1, 5]), pack_int32([0, 99]),
             pack_int32([3, 3]), b"\x00\x01", pack_int32([0, 2]), pack_int32([41, 42])),
    StepResult(42, 1000, pack_int32([5, 6]), IDS, pack_int32([0, 1]), pack_int32([99, 3]), pack_int32([1, 0]),
               pack_int32([777]), bytes([Finish.NONE, Finish.NUMERICAL_ERROR]), 23_456, 25_000, pack_int32([1]),
               pack_int32([777]), pack_float32([-0.125]), (PROMPT_LOGPROBS,), (EMBEDDING,)),
    CompileGrammar(ID_A, 1, GRAMMAR),
    GrammarCompiled(ID_A, 1, "the schema is too deep: 层"),
]  # fmt: skip


def golden_text() -> str:
    """What `golden.txt` must hold: `Name hex`, a line for each message."""
    return "".join(f"{type(item).__name__} {encode(item).hex()}\n" for item in EXAMPLES)


if __name__ == "__main__":
    GOLDEN_FILE.write_text(golden_text(), encoding="ascii")
