"""A Llama-like decoder in one forward pass over a packed batch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 # its customary name

from worker_svc.models.progress import Progress
from worker_svc.runner.torch.block import Attention, Block, WeightReader
from worker_svc.runner.torch.checkpoint import Checkpoint
from worker_svc.runner.torch.compute import Compute
from worker_svc.runner.torch.families.registry import FAMILIES
from worker_svc.runner.torch.layers import rotations


class DecoderModel:
    """Weights of a decoder; T tokens of any number of sequences go through it in one call."""

    def __init__(self, checkpoint: Checkpoint, compute: Compute, max_len: int, progress: Progress) -> None:
        self.config = checkpoint.config
        self.compute = compute
        weights = WeightReader(checkpoint, compute)
        make_block = FAMILIES[self.config.architecture].block
        self._blocks: list[Block] = []
        for index in range(self.config.num_layers):
            progress("loading weights", index / (self.config.num_layers + 1))
            self._blocks.append(make_block(weights, index))
        self._norm = weights.norm("model.norm.weight")
        self._embedding, self._head = weights.embedding_and_head()
        self.max_len = max_len
        self._turns = rotations(self.config, max_len, checkpoint.rope_factors).to(compute.device)
        progress("loading weights", 1.0)

    def hidden(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Return the last layer's output, [T, hidden], for `token_ids` [T] at `positions` [T]."""
        turns = self._turns[positions].unsqueeze(1)  # [T, 1, head_dim / 2]
        x = F.embedding(token_ids, self._embedding).to(self.compute.activations)  # [T, hidden]
        for block in self._blocks:
            x = block(x, turns, attention)
        return x

    def normed(self, hidden: Tensor) -> Tensor:
        """Return rows of the last layer's output as the head takes them."""
        return self._norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [R, vocab] of R rows of the last layer's output."""
        return self._head(self._norm(hidden)).float()
