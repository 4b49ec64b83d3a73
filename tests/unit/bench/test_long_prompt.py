"""The bench of a long prompt among decodes: which gaps count, and what the figures come to."""

from __future__ import annotations

import asyncio

import pytest

from bench.long_prompt import Arrival, Decodes, Round, figures, main

STEADY = [0.1 * step for step in range(20)]  # up to 1.9
HELD_UP = [*STEADY, 2.4, 2.9, 3.0, 3.1]
ARRIVAL = Arrival([HELD_UP, HELD_UP], sent_s=1.95, first_token_s=2.8)


def test_gaps_count_before_the_prompt_and_while_it_is_computed() -> None:
    assert ARRIVAL.gaps_before() == pytest.approx([0.1] * 22)  # without the first eight texts of each
    assert ARRIVAL.gaps_during() == pytest.approx([0.5] * 4)
    assert ARRIVAL.is_covered
    assert not Arrival([HELD_UP, STEADY], 1.95, 2.8).is_covered


def test_the_figures_are_those_of_all_rounds() -> None:
    found = figures([Round(ARRIVAL, alone_s=0.68)] * 3, 4000)
    assert found["itl_p99_before_ms"] == pytest.approx(100)
    assert found["itl_p99_added_ms"] == pytest.approx(400)
    assert found["prefill_among_tokens_per_s"] == pytest.approx(4000 / 0.85, rel=1e-3)
    assert found["prefill_alone_tokens_per_s"] == pytest.approx(4000 / 0.68, rel=1e-3)
    assert found["prefill_share_kept"] == pytest.approx(0.8)


def test_the_prompt_waits_until_every_decode_has_begun() -> None:
    async def main() -> None:
        decodes = Decodes(2)
        for number in (0, 0, 1):
            for _ in range(48):
                assert not decodes.begun.is_set()
                decodes.count(number)
        assert decodes.begun.is_set()

    asyncio.run(main())


def test_what_cannot_be_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output-tokens", "48"])
    assert "--output-tokens must be more than 48" in capsys.readouterr().err
