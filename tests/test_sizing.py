"""The formulas against the numbers that ZeRO's paper prints, and against sums done by hand."""

from __future__ import annotations

import pytest

from hpczero.sizing import (
    BucketShape,
    buffer_bytes,
    memory_formula,
    state_bytes,
    traffic_multiples,
    wire_bytes,
    wire_piece,
)

# ZeRO (arXiv 1910.02054), table 1: GB per device at stages 1, 2, 3, by model size and ranks.
TABLE_1 = {
    7.5e9: {
        1: ("120", "120", "120"),
        4: ("52.5", "41.3", "30"),
        16: ("35.6", "21.6", "7.5"),
        64: ("31.4", "16.6", "1.88"),
        256: ("30.4", "15.4", "0.47"),
        1024: ("30.1", "15.1", "0.12"),
    },
    128e9: {
        1: ("2048", "2048", "2048"),
        4: ("896", "704", "512"),
        16: ("608", "368", "128"),
        64: ("536", "284", "32"),
        256: ("518", "263", "8"),
        1024: ("513", "257", "2"),
    },
    1e12: {
        1: ("16000", "16000", "16000"),
        4: ("7000", "5500", "4000"),
        16: ("4750", "2875", "1000"),
        64: ("4187", "2218", "250"),
        256: ("4046", "2054", "62.5"),
        1024: ("4011", "2013", "15.6"),
    },
}


def one(numel: int, item_bytes: int = 2, padded: int | None = None) -> BucketShape:
    return BucketShape("all", numel, padded or numel, True, "", item_bytes)


@pytest.mark.parametrize("model", TABLE_1)
def test_every_cell_of_the_papers_table_1(model: float) -> None:
    for ranks, cells in TABLE_1[model].items():
        for stage, printed in enumerate(cells, start=1):
            gigabytes = sum(state_bytes([one(int(model))], stage, ranks).values()) / 1e9
            # The paper rounds its decimals, and truncates from 100 GB on.
            step = 1.0 if "." not in printed else 10.0 ** -len(printed.split(".")[1])
            error = gigabytes - float(printed)
            fits = 0 <= error < 1 if gigabytes >= 100 else abs(error) <= 0.5001 * step
            assert fits, (model, ranks, stage, printed, gigabytes)


@pytest.mark.parametrize(
    ("item_bytes", "accumulation", "whole_and_sharded"),
    [
        (2, 1, [(16, 0), (4, 12), (2, 14), (0, 16)]),
        (2, 4, [(18, 0), (6, 12), (2, 16), (0, 18)]),
        (4, 1, [(16, 0), (8, 8), (4, 12), (0, 16)]),
        (4, 4, [(16, 0), (8, 8), (4, 12), (0, 16)]),
    ],
)
def test_bytes_per_parameter(
    item_bytes: int, accumulation: int, whole_and_sharded: list[tuple[int, int]]
) -> None:
    for stage, (whole, sharded) in enumerate(whole_and_sharded):
        for ranks in (1, 2, 4):
            found = state_bytes([one(4096, item_bytes)], stage, ranks, accumulation)
            assert sum(found.values()) == whole * 4096 + sharded * 4096 // ranks


def test_what_each_state_takes() -> None:
    shape = [one(4000)]
    assert state_bytes(shape, 0, 4) == {"params": 8000, "grads": 8000, "states": 48000}
    assert state_bytes(shape, 1, 4) == {"params": 8000, "grads": 8000, "states": 12000}
    assert state_bytes(shape, 2, 4) == {"params": 8000, "grads": 2000, "states": 12000}
    assert state_bytes(shape, 3, 4) == {"params": 2000, "grads": 2000, "states": 12000}


def test_the_dtype_that_gradients_add_up_in_goes_before_the_accumulations() -> None:
    for grad_bytes in (2, 4):
        asked = [one(4000)._replace(grad_bytes=grad_bytes)]
        for accumulation in (1, 4):
            assert state_bytes(asked, 0, 4, accumulation)["grads"] == 4000 * grad_bytes
            assert traffic_multiples(1, 4, 2, accumulation, grad_bytes=grad_bytes) == (
                grad_bytes // 2 + 1
            )


def test_frozen_parameters_have_no_gradient_and_no_states() -> None:
    frozen = one(1000)._replace(trainable=False)
    assert state_bytes([frozen], 0, 2) == {"params": 2000, "grads": 0, "states": 0}
    assert state_bytes([frozen], 3, 2) == {"params": 1000, "grads": 0, "states": 0}
    assert buffer_bytes([frozen], 2, 2) == wire_bytes(2)  # nothing to reduce


def test_a_ragged_shard_counts_its_last_element() -> None:
    assert state_bytes([one(5, 4)], 3, 4) == {"params": 8, "grads": 8, "states": 16}


def test_padding_is_a_buffer() -> None:
    assert buffer_bytes([one(100, padded=128)], 1, 2) == 28 * 4 + 14 * 12 + wire_bytes(2)


def test_buffers_are_the_roots_and_the_two_largest_other_units() -> None:
    blocks = {"blocks.0": 512, "blocks.1": 256, "blocks.2": 1024}
    shapes = [
        BucketShape("root", 128, 128, True, "", 2),
        BucketShape("root.frozen", 128, 128, False, "", 2),
        *(BucketShape(unit, numel, numel, True, unit, 2) for unit, numel in blocks.items()),
        BucketShape("blocks.0.fp32", 64, 64, True, "blocks.0", 4),
    ]
    slots = 2 * (128 + 512 + 1024) + 4 * 64
    assert buffer_bytes(shapes, 0, 2) == wire_bytes(2)
    assert buffer_bytes(shapes, 2, 2) == slots + wire_bytes(2)
    assert buffer_bytes(shapes, 3, 2) == slots + (slots + 2 * 128) + wire_bytes(2)
    assert memory_formula(shapes, 3, 2) == {
        **state_bytes(shapes, 3, 2),
        "buffers": buffer_bytes(shapes, 3, 2),
    }


def test_what_is_persistent_is_a_whole_buffer_beside_its_shard() -> None:
    shapes = [
        BucketShape("root", 128, 128, True, "", 2),
        *(BucketShape(f"blocks.{i}", 256, 256, True, f"blocks.{i}", 2) for i in range(4)),
    ]
    kept = [shapes[0]._replace(persistent=True), *shapes[1:3]]
    kept += [shape._replace(persistent=True) for shape in shapes[3:]]
    assert buffer_bytes(kept, 3, 2) == buffer_bytes(shapes, 3, 2) + 2 * 2 * 256
    for stage in range(3):
        assert memory_formula(kept, stage, 2) == memory_formula(shapes, stage, 2)
    assert state_bytes(kept, 3, 2) == state_bytes(shapes, 3, 2)


def test_a_reduction_stages_8_mib_at_most_up_to_128_ranks() -> None:
    assert [wire_piece(ranks) for ranks in (1, 8, 16, 128, 1000)] == [
        1 << 20, 1 << 20, 1 << 19, 1 << 16, 1 << 16,
    ]  # fmt: skip
    assert wire_bytes(4) == (4 << 20) + 3 * (1 << 18)


def test_traffic() -> None:
    for item_bytes in (2, 4):
        assert [traffic_multiples(stage, 1, item_bytes) for stage in range(4)] == [2, 2, 2, 3]
    # k backwards: stages 2 and 3 reduce in each; bf16 gradients that accumulate travel as fp32.
    assert [traffic_multiples(stage, 4, 2, accumulation=4) for stage in range(4)] == [4, 3, 5, 12]
    assert [traffic_multiples(stage, 4, 4, accumulation=4) for stage in range(4)] == [2, 2, 5, 12]


def test_traffic_of_what_is_persistent() -> None:
    assert traffic_multiples(3, 1, 2, persistent=1.0) == 2  # one gather, one reduction
    assert traffic_multiples(3, 4, 2, 4, persistent=1.0) == 5
    assert traffic_multiples(3, 4, 2, 4, persistent=0.25) == 12 - 0.25 * 7
    assert traffic_multiples(2, 4, 2, 4, persistent=0.25) == 5
