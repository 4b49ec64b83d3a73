"""Seeded lines of mixed English, Chinese, code, emoji and white space: what a tokenizer meets, and meets wrongly."""

from __future__ import annotations

import random

_ENGLISH = [
    "the", "quick", "brown", "fox", "don't", "can't", "I'll", "we're", "they've", "she'd", "it's", "running", "HELLO",
    "World", "naïve", "café", "résumé", "über", "coöperate", "Zürich", "ĳssel", "ﬁn", "Ångström", "e\u0301clair",
    "n\u0303", "internationalization", "supercalifragilistic", "OK", "3rd", "2nd", "v1.2.3",
]  # fmt: skip
_CHINESE = [
    "你好世界", "机器学习", "大语言模型", "今天天气很好。", "我们去公园吧！", "「引用」",
    "日本語テスト", "한국어", "시험", "繁體中文", "，、；：",
]  # fmt: skip
_CODE = [
    "def f(x: int) -> str:", "    return x**2", "\tif (a && b) {", "};", "#include <stdio.h>", "a[i] += 0x1F;",
    "SELECT * FROM t WHERE id=10;", "<div class='x'>", "</div>", "// TODO", "lambda x: x", "print(f\"{x!r}\")", "!=",
    "===", "->", "::", "|>", "<|", "\\n", "'''", "http://example.com/a?b=c&d=%20",
]  # fmt: skip
_EMOJI = ["🙂", "👋🌍", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "❤️", "🫠", "☃", "→", "½", "²", "٣", "१२३", "Ⅷ", "①"]
_SPACES = [
    " ",
    "  ",
    "   ",
    "\t",
    "\t\t",
    "\n",
    "\n\n",
    "\r\n",
    " \n ",
    "\u00a0",
    "\u3000",
    "\u2003",
    "\u200b",
    "\x0b",
    "\u2028",
]
_DIGITS = ["0", "7", "42", "1234", "1234567", "3.14159", "1e-5", "10,000", "2024-01-31"]
_ODD = [
    "\x00",
    "\x7f",
    "\u0378",
    "\ufffd",
    "\ue000",
    "\U0010fffd",
    "\ufeff",
    "ÿ",
    "Ġ",
    "▁",
    "ｆｕｌｌ",
    "𝔘𝔫𝔦",
    "ä̈",
    "ཀྵ",
    "שלום",
    "مرحبا",
]


def mixed_lines(num_lines: int, seed: int) -> list[str]:
    """Return `num_lines` lines of 1 to 24 pieces, joined by nothing, blanks or other white space."""
    rng = random.Random(seed)
    kinds = [_ENGLISH, _CHINESE, _CODE, _EMOJI, _SPACES, _DIGITS, _ODD]
    weights = [6, 4, 3, 2, 3, 2, 1]
    lines = []
    for _ in range(num_lines):
        pieces = []
        for kind in rng.choices(kinds, weights, k=rng.randint(1, 24)):
            pieces.append(rng.choice(kind))
            pieces.append(rng.choice(["", " ", " ", rng.choice(_SPACES)]))
        lines.append("".join(pieces))
    return lines
