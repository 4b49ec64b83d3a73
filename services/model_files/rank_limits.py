"""How many processes can share a model: what its configuration alone tells, before torch or a weight is loaded.

The launcher refuses by this what the worker, which splits the model by it, could refuse only once all ranks are up.
"""

from __future__ import annotations

from collections.abc import Mapping

# A rank without a query head, a column or an id would have nothing to compute. Ranks may share a key/value head.
_DEALT_OUT = ("num_attention_heads", "intermediate_size", "vocab_size")


def sharing_problem(config: Mapping[str, object], num_ranks: int) -> str:
    """Why so many ranks cannot share a model, in one line that says how many can; "" where nothing forbids it.

    Args:
        config: fields in the spelling of config.json; one that is absent or no whole number forbids nothing here.
        num_ranks: that are to share it, >= 1.
    """
    counts = {name: count for name in _DEALT_OUT if isinstance(count := config.get(name), int) and count > 0}
    if not counts or num_ranks <= (most := min(counts.values())):
        return ""
    scarce = next(name for name, count in counts.items() if count == most)
    kv_heads = config.get("num_key_value_heads") if scarce == "num_attention_heads" else None
    beside = "" if kv_heads is None else f" with num_key_value_heads {kv_heads}"
    return (
        f"--tp-size {num_ranks}: {scarce} {most}{beside} can be shared by at most {most} ranks; "
        f"set --tp-size {most} or less"
    )
