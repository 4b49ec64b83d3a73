"""Every message that crosses a process, by its tag. A test holds docs/protocol.md against this list.

Rules that hold for all of them:
- What concerns a request carries (request id, attempt, index of the first token). A receiver takes only what continues
  its cursor, drops older indexes and other attempts, and asks again for a gap (`Resend`).
- Intervals of token indexes are half-open and count output tokens: index 0 is the first token after the prompt.
- Batches are columns (see `columns`): row i of every column belongs together.
- Request ids are 16 random bytes made by the tokenizer process; what a client calls its request never appears here.
- Tags are never reused. A change of a field's meaning, type or place raises PROTOCOL_VERSION.

The messages are declared in `members`, `requests`, `controls`, `answers` and `steps`, what they are made of in
`request_params`, `fields` and `finish`; import them from there.
"""

from __future__ import annotations

from services.wire.answers import DecodeFailed, DecodeOpen, HopReport, StopFound, TextChunks, TokensProduced
from services.wire.controls import Control, ControlDone
from services.wire.members import Goodbye, HandshakeRefused, Heartbeat, Hello, Roster, Telemetry, Welcome
from services.wire.requests import Abort, Acknowledge, Admitted, Load, Refused, Resend, Submit
from services.wire.steps import CompileGrammar, Embedding, GrammarCompiled, PromptLogprobs, StepPlan, StepResult

PROTOCOL_VERSION = 7

MESSAGE_TYPES: dict[int, type] = {
    1: Hello,
    2: Welcome,
    3: HandshakeRefused,
    4: Roster,
    5: Heartbeat,
    6: Goodbye,
    7: Telemetry,
    10: Submit,
    11: Admitted,
    12: Refused,
    13: Abort,
    14: Load,
    15: Acknowledge,
    16: Resend,
    17: Control,
    18: ControlDone,
    19: PromptLogprobs,
    20: DecodeOpen,
    21: TokensProduced,
    22: StopFound,
    23: DecodeFailed,
    30: TextChunks,
    31: Embedding,
    32: HopReport,
    40: StepPlan,
    41: StepResult,
    42: CompileGrammar,
    43: GrammarCompiled,
}
