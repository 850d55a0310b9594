"""The rates of the simulated engines, computed from hardware figures at the efficiencies that engines reach.

- `token`: 2 FLOP a parameter, at half of the peak.
- `attention`: 4 FLOP a layer and hidden dimension for each pair of tokens, at 0.4 of the peak.
- `step`: reading the weights at 0.7 of the bandwidth, and the engine's own overhead.
- `context_token`: reading the KV state of a token at 0.7 of the bandwidth.
- `kv_tokens`: the memory that remains for the KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from router.policies.rates import Rates


@dataclass(frozen=True, slots=True)
class Profile:
    """An engine: its rates, the tokens that its KV cache holds, and the most requests that it runs at once."""

    name: str
    rates: Rates
    kv_tokens: int
    max_requests: int = 256


LLAMA_70B = Profile("70B on 8 H100", Rates(0.012, 4.2e-5, 8e-10, 1.8e-8), 1_200_000)
LLAMA_8B = Profile("8B on 1 H100", Rates(0.009, 3.6e-5, 1.3e-9, 5.6e-8), 400_000)
