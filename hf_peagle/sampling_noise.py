"""The random numbers of plain sampling, so that drafts do not change what a seed generates."""

from __future__ import annotations

import torch


class NoiseStream:
    """
    `torch.multinomial(p, 1)` is `argmax(p / e)` with exponential noise `e`, one `[batch, vocab]` draw per generated
    token. This class makes the same draws in the same order and keeps the ones of positions that were verified but not
    committed, so a sampled token depends on the seed and its position only: not on the drafts, nor on how many there
    were. Plain `generate()` with the same seed picks the same tokens.
    """

    # Rows of a batch may be many tokens apart. Noise this far behind the newest is drawn again from its generator state.
    KEPT_STEPS = 32

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self.batch_size = batch_size
        self.device = device
        self._generator = _default_generator(device)
        self._states: list[torch.Tensor] = []  # generator state before the draw of every step
        self._noise: dict[int, torch.Tensor] = {}

    def rows(self, steps: list[int], vocab_size: int) -> torch.Tensor:
        """`[batch, vocab_size]` noise, row `b` that of generated position `steps[b]` (0 is the first new token)."""
        needed = sorted(set(steps))
        drawn = {step: self._draw(step, vocab_size) for step in needed}
        if len(needed) == 1:
            return drawn[needed[0]]
        return torch.stack([drawn[step][b] for b, step in enumerate(steps)])

    def block(self, starts: list[int], q: int, vocab_size: int) -> torch.Tensor:
        """`[batch, q, vocab_size]` noise of `q` positions from `starts[b]` on."""
        return torch.stack([self.rows([start + i for start in starts], vocab_size) for i in range(q)], dim=1)

    def close(self, steps: int) -> None:
        """Leaves the generator where plain sampling of `steps` tokens leaves it."""
        if steps < len(self._states):
            self._generator.set_state(self._states[steps])

    def _draw(self, step: int, vocab_size: int) -> torch.Tensor:
        while len(self._states) <= step:
            newest = len(self._states)
            self._states.append(self._generator.get_state())
            self._noise[newest] = self._exponential(vocab_size)
            self._noise.pop(newest - self.KEPT_STEPS, None)
        if step not in self._noise:
            now = self._generator.get_state()
            self._generator.set_state(self._states[step])
            again = self._exponential(vocab_size)
            self._generator.set_state(now)
            return again
        return self._noise[step]

    def _exponential(self, vocab_size: int) -> torch.Tensor:
        return torch.empty(self.batch_size, vocab_size, device=self.device).exponential_(1, generator=self._generator)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    module = getattr(torch, device.type)
    index = device.index if device.index is not None else module.current_device()
    return module.default_generators[index]
