"""Advice about pages changes where data lies and never what it is."""

from __future__ import annotations

import torch

from dlite_agent.kernels.large_pages import (
    LargePageMemory,
    gather_pages,
    prefer_large_pages,
    return_freed,
)


def test_gathered_tensor_holds_what_it_held() -> None:
    generator = torch.Generator().manual_seed(0)
    for size in (10, 2**18, 2**21 + 3):
        tensor = torch.randn(size, generator=generator)
        before = tensor.clone()
        gather_pages(tensor)
        assert torch.equal(tensor, before)


def test_packed_weight_computes_what_it_did() -> None:
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    x = torch.ones(1, 1024, dtype=torch.bfloat16)
    before = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    gather_pages(packed)
    after = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    assert torch.equal(before, after)


def test_reserved_memory_can_be_written() -> None:
    memory = torch.empty(2**22)
    prefer_large_pages(memory)
    memory.fill_(1.0)
    assert float(memory.sum()) == 2**22


def test_pieces_do_not_overlap_and_keep_what_is_written() -> None:
    memory = LargePageMemory()
    sizes = [100, 2**20 + 1, 70 * 2**20, 64]
    pieces = [memory.take(size) for size in sizes]
    for number, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0
        piece[:64], piece[-1:] = number, number
    memory.close()
    return_freed()
    for number, (size, piece) in enumerate(zip(sizes, pieces, strict=True)):
        assert piece.shape == (size,)
        assert piece[:64].unique().tolist() == [number]
        assert int(piece[-1]) == number
