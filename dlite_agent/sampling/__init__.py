"""From logits to tokens: the one place for temperature, filters, penalties, bias and noise."""

from dlite_agent.sampling.history import TokenHistory
from dlite_agent.sampling.logprobs import TokenLogprobs, token_logprobs
from dlite_agent.sampling.noise import KeyedNoise
from dlite_agent.sampling.sampler import Sampler
from dlite_agent.sampling.token_mask import RowMasks, TokenMask

__all__ = [
    "KeyedNoise",
    "RowMasks",
    "Sampler",
    "TokenHistory",
    "TokenLogprobs",
    "TokenMask",
    "token_logprobs",
]
