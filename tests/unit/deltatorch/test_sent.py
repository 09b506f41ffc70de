"""What worker processes send: whatever a user's collate_fn makes."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from converter.deltatorch.loader import _sent


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_tensors_of_any_kind_arrive_as_they_were() -> None:
    plain, pair = torch.arange(6.0).reshape(2, 3), torch.tensor([1 + 2j, 3 - 4j])
    lists = torch.nested.nested_tensor([torch.ones(2), torch.zeros(1)])
    batch = {
        "plain": plain,
        "turned": plain.T,
        "conj": pair.conj(),
        "lists": lists,
        "text": ["a", "b"],
        "one": (plain, 7),
    }
    (((sizes, (found,)), is_last),) = pickle.loads(ForkingPickler.dumps(_sent([(([], [batch]), True)])))
    assert (sizes, is_last, list(found), found["text"], found["one"][1]) == ([], True, list(batch), ["a", "b"], 7)
    assert found["plain"].equal(plain)
    assert found["one"][0].equal(plain)
    assert found["turned"].equal(plain.T)
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j]
    assert [part.tolist() for part in found["lists"].unbind()] == [[1.0, 1.0], [0.0]]
