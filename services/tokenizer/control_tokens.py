"""Keeps clients from writing control tokens: in prompts made by a template, those go by private names.

At start every control token gets a random name of private-use characters that no client can know. A second tokenizer
knows the control tokens by these names *only*, and the literals of a chat template are renamed to match. Then the text
of `<|im_end|>` in a message is plain text for that tokenizer, in one piece or put together across the borders of
messages and template, while the rest (merges, ids, white space rules of added tokens) stays the model's.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable

from tokenizers import Tokenizer

from services.model_files.tokenizer import LoadedTokenizer

# Supplementary Private Use Area-B: 65,534 characters that no text has a meaning for.
_FIRST_PRIVATE, _NUM_PRIVATE = 0x100000, 0xFFFE
# The stand-ins of a shield come from Area-A.
_FIRST_STAND_IN = 0xF0000
_WORD_BORDER = re.compile(r"^\w|\w$")
_MARK_LENGTH = 6
PRIVATE_NAME_LENGTH = _MARK_LENGTH + 1


class ControlTokens:
    """The private names of a tokenizer's control tokens, and the tokenizer that knows them.

    Attributes:
        tokenizer: The model's tokenizer with its control tokens under their private names.
    """

    def __init__(self, loaded: LoadedTokenizer) -> None:
        """Draw the names and build the second tokenizer (as much memory and half the time as the first)."""
        contents = [token.content for token in loaded.control_tokens]
        self._mark = draw_private_text(_MARK_LENGTH)
        self._names = {text: self._mark + chr(_FIRST_PRIVATE + index) for index, text in enumerate(contents)}
        self._texts = {name: text for text, name in self._names.items()}
        self._pattern = _any_of(contents)
        self._any_name = re.compile(re.escape(self._mark) + ".", re.DOTALL)
        self.tokenizer = _renamed(loaded, self._names)

    def protect(self, text: str) -> str:
        """Put the private name for every control token in a text that the operator or the model's author wrote."""
        return self._pattern.sub(lambda match: self._names[match[0]], text) if self._names else text

    def reveal(self, text: str) -> str:
        """Put the control tokens back for their private names: the text as the model's own tokenizer spells it."""
        return self._any_name.sub(lambda match: self._texts.get(match[0], match[0]), text)

    def spelled_out(self, text: str) -> bool:
        """Return whether a control token stands in the text under its public spelling."""
        return bool(self._names) and self._pattern.search(text) is not None

    def holds_private_name(self, text: str) -> bool:
        """Return whether the text holds the secret part of the names; a client's never does by chance."""
        return self._mark in text

    def num_text_bytes(self, text: str) -> int:
        """Return the UTF-8 length of a protected text without its private names.

        Raises:
            UnicodeEncodeError: the text holds a lone surrogate.
        """
        return len(text.encode("utf-8")) - text.count(self._mark) * PRIVATE_NAME_LENGTH * 4

    def shield(self, texts: Iterable[str]) -> Shield:
        """Make a shield whose stand-ins occur in none of the texts."""
        return Shield(self._names, texts)


class Shield:
    """Takes out of clients' texts what control tokens could be put together from, and puts it back later.

    The first and last characters of control tokens are replaced by stand-ins, one character for one, so that lengths
    stay; in a text that is itself a part of a control token (`end`) every character is. So a control token that is
    spelled out in a text made of shielded parts comes from elsewhere. Tokens that begin or end like a word are left
    out: taking letters away would change the names of fields that templates look for.
    """

    def __init__(self, names: dict[str, str], texts: Iterable[str]) -> None:
        """Draw the stand-ins."""
        self._names = {text: name for text, name in names.items() if not _WORD_BORDER.search(text)}
        self._pattern = _any_of(self._names)
        self._max_length = max(map(len, self._names), default=0)
        borders = sorted({character for text in self._names for character in (text[0], text[-1])})
        others = sorted({character for text in self._names for character in text} - set(borders))
        used = set().union(*texts)
        free = (chr(_FIRST_STAND_IN + index) for index in range(_NUM_PRIVATE))
        stand_ins = dict(zip(borders + others, (c for c in free if c not in used), strict=False))
        self._for_parts = str.maketrans(stand_ins)
        self._for_texts = str.maketrans({border: stand_ins[border] for border in borders if border in stand_ins})
        self._lower = str.maketrans({stand_in: character for character, stand_in in stand_ins.items()})

    def value(self, text: str) -> str:
        """Return a client's text with stand-ins."""
        is_part = len(text) <= self._max_length and any(text in name for name in self._names)
        return text.translate(self._for_parts if is_part else self._for_texts)

    def key(self, text: str) -> str:
        """Return a key with stand-ins; ordinary ones stay, templates look for them."""
        return text.translate(self._for_texts)

    def lowered(self, text: str) -> str:
        """Return a text with its stand-ins turned back."""
        return text.translate(self._lower)

    def spelled_out(self, text: str) -> bool:
        """Return whether a control token stands in a text of shielded parts."""
        return bool(self._names) and self._pattern.search(text) is not None

    def protect(self, text: str) -> str:
        """Put the private names for the control tokens spelled out in a text of shielded parts."""
        return self._pattern.sub(lambda match: self._names[match[0]], text)


def draw_private_text(length: int) -> str:
    """Return `length` random private-use characters (16 bits each) that nobody outside can guess."""
    return "".join(chr(_FIRST_PRIVATE + secrets.randbelow(_NUM_PRIVATE)) for _ in range(length))


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """Match the leftmost of the texts, the longest where several begin: how the tokenizers library finds them."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))


def _renamed(loaded: LoadedTokenizer, names: dict[str, str]) -> Tokenizer:
    """Build a copy of the tokenizer in which `names` replaces the spelling of tokens; ids stay."""
    spec = json.loads(loaded.tokenizer.to_str())
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = spec["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        # No merge may lead to a control token: some converted vocabularies list such merges.
        pairs = (merge if isinstance(merge, list) else merge.split(" ") for merge in model["merges"])
        model["merges"] = [pair for pair in pairs if not ({*pair, "".join(pair)} & names.keys())]
    tokenizer = Tokenizer.from_str(json.dumps(spec))
    moved = [t.content for t in loaded.control_tokens if tokenizer.token_to_id(names[t.content]) != t.token_id]
    if moved:
        raise RuntimeError(f"the protected tokenizer gives other ids to {moved[:3]}")
    return tokenizer
