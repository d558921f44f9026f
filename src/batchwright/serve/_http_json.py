"""JSON in and out: strict both ways, arrays as lists."""

from __future__ import annotations

import json
from typing import Any, NoReturn


def decode_json(body: bytes) -> Any:
    """Read one JSON value; NaN and infinity are not JSON.

    >>> decode_json(b'{"text": "to be"}')
    {'text': 'to be'}
    """
    return json.loads(body, parse_constant=_refuse)


def encode_json(answer: Any) -> bytes:
    """Write an answer as JSON; what has ``tolist``, as arrays and tensors do, becomes lists.

    >>> import numpy as np
    >>> encode_json({"vector": np.array([1.5, 2.0])})
    b'{"vector":[1.5,2.0]}'
    """
    # All but ASCII is escaped: half of a character pair, which JSON can hold, has no other way out.
    return json.dumps(answer, default=_as_list, allow_nan=False, separators=(",", ":")).encode("ascii")


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _as_list(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON; return plain values, or pass encode=")
