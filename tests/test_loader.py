"""The order of samples: as DistributedSampler's, and the rest of an epoch on other ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hpczero.loader import EpochLoader, GlobalOrder


def loaders(samples: int, ranks: int, batch: int, drop_last: bool = False) -> list[EpochLoader]:
    data = TensorDataset(torch.arange(samples))
    return [
        EpochLoader(data, batch=batch, ranks=ranks, rank=rank, drop_last=drop_last)
        for rank in range(ranks)
    ]


def taken(loader: EpochLoader, batches: int | None = None) -> list[int]:
    result: list[int] = []
    for number, (batch,) in enumerate(loader):
        result += batch.tolist()
        if number + 1 == batches:
            break
    return result


@given(st.integers(1, 40), st.integers(1, 6), st.booleans(), st.integers(0, 3))
def test_the_order_is_that_of_torch(samples: int, ranks: int, drop: bool, epoch: int) -> None:
    data = TensorDataset(torch.arange(samples))
    for rank in range(ranks):
        theirs = DistributedSampler(data, ranks, rank, drop_last=drop)
        theirs.set_epoch(epoch)
        ours = GlobalOrder(samples, ranks, rank, drop)
        ours.epoch = epoch
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.data())
def test_other_ranks_take_the_rest_of_the_epoch(
    samples: int, ranks: int, others: int, batch: int, data: st.DataObject
) -> None:
    first = loaders(samples, ranks, batch)
    count = data.draw(st.integers(1, len(first[0])))
    had = [sample for loader in first for sample in taken(loader, count)]
    states = [loader.state_dict() for loader in first]
    assert all(state == states[0] for state in states)
    then = loaders(samples, others, batch)
    for loader in then:
        loader.load_state_dict(states[0])
    rest = [sample for loader in then for sample in taken(loader)]
    if count < len(first[0]):  # nothing twice but the padding, nothing left out
        assert set(had) | set(rest) == set(range(samples))
        assert len(had) + len(rest) < samples + ranks + others
    else:  # the epoch had ended: this is the next one
        assert set(rest) == set(range(samples))
        assert then[0].epoch == 1


def test_resuming_equals_going_on_and_takes_no_random_numbers() -> None:
    (through,) = loaders(20, 1, 3)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    epochs = [taken(through) for _ in range(3)]
    assert torch.equal(torch.get_rng_state(), before)
    (stopped,) = loaders(20, 1, 3)
    parts = [*taken(stopped), *taken(stopped, 4)]
    (resumed,) = loaders(20, 1, 3)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    assert parts + taken(resumed) + taken(resumed) == [s for epoch in epochs for s in epoch]
