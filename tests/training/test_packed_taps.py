"""Eight bits a channel keep what a drafter reads, also beside huge channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dlite_agent.errors import UnsupportedCheckpointError
from dlite_agent.training.packed_taps import pack_taps, packed_bytes, unpack_taps
from dlite_agent.training.records import Records
from tests.training.languages import make_ends, memorable


@pytest.mark.parametrize("width", [64, 50])
def test_states_come_back_nearly(width: int) -> None:
    states = torch.randn(20, 3, width, generator=torch.Generator().manual_seed(1))
    if width == 64:
        states[..., 5] *= 1000.0  # its group of channels loses the rest, the others do not
    codes, scales = pack_taps(states)
    error = (unpack_taps(codes, scales) - states)[..., width // 2 :]
    assert codes.dtype == torch.int8
    assert error.norm() < 0.012 * states[..., width // 2 :].norm()
    assert codes[0, 0].nbytes + scales[0, 0].nbytes == packed_bytes(width)


def test_packed_records_are_batched_as_numbers(tmp_path: Path) -> None:
    records = memorable(make_ends())
    packed = Records.join([records.pack(), records.pack()])
    packed.save(tmp_path / "a.safetensors")
    read = Records.load(tmp_path / "a.safetensors")
    chosen = torch.arange(4)
    batch, other = records.batch(chosen, 7), read.batch(chosen, 7)
    assert read.nbytes < 2 * records.nbytes / 2.5
    assert (other.final_taps - batch.final_taps).norm() < 0.012 * batch.final_taps.norm()
    assert (other.taps - batch.taps).norm() < 0.012 * batch.taps.norm()
    path = tmp_path / "a.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(UnsupportedCheckpointError, match="capture again"):
        Records.load(path)
