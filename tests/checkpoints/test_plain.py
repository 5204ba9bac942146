"""Plain data through JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpczero.checkpoints.plain import decode, encode

leaves = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
keys = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("__type__")
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.sets(st.integers())
    ),
    max_leaves=20,
)


def through(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value, "it"))))


@given(values)
def test_what_comes_back_is_equal_and_of_the_same_type(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)


def test_what_schedulers_keep() -> None:
    milestones = Counter({30: 1, 80: 2})
    back = through({"milestones": milestones, "lr": np.float64(0.5)})
    assert back == {"milestones": milestones, "lr": 0.5}
    assert type(back["milestones"]) is Counter
    tensor = torch.tensor([0.1, float("inf")], dtype=torch.float64)
    assert torch.equal(through(tensor), tensor)
    step = through(torch.tensor(7.0))
    assert (step.item(), step.shape, step.dtype) == (7.0, (), torch.float32)


@pytest.mark.parametrize("value", [object(), print, torch.zeros(65), b"bytes"])
def test_others_are_refused_by_their_place(value: Any) -> None:
    with pytest.raises(TypeError, match=r"client_state\.a\[1\]: .*" + type(value).__name__):
        encode({"a": [0, value]}, "client_state")
