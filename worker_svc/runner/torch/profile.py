"""Measures what a GPU needs beside KV blocks."""

from __future__ import annotations

import torch
from octavo.sampling import SamplingParams

from worker_svc.runner.base import Row, SequenceData, StepBatch
from worker_svc.runner.torch.attention import PagedAttention, PieceSize
from worker_svc.runner.torch.kv_pool import KvPool
from worker_svc.runner.torch.model import DecoderModel
from worker_svc.runner.torch.packing import BlockTables, pack

_BLOCK_SIZE = 16


def gpu_bytes_beside_kv(
    model: DecoderModel, max_num_batched_tokens: int, max_num_seqs: int, pieces: PieceSize
) -> int:
    """Return weights, the peak of a largest step, and what others hold on the device.

    That step is a chunk at the end of the longest context. Its blocks stand for all of the context: what is
    in them does not matter, what is gathered from them does.
    """
    device = model.compute.device
    tokens = min(max_num_batched_tokens, model.max_len)
    num_blocks = -(-tokens // _BLOCK_SIZE) + 1
    table = [index % num_blocks for index in range(-(-model.max_len // _BLOCK_SIZE))]
    torch.cuda.reset_peak_memory_stats(device)
    with torch.inference_mode():
        pool = KvPool(model.config, model.compute, num_blocks, _BLOCK_SIZE, 0)
        sequence = SequenceData(0, [0] * model.max_len, model.max_len, SamplingParams(), block_table=table)
        row = Row(sequence, model.max_len - tokens, tokens, sample=False)
        packed = pack(StepBatch((row,)), BlockTables(), _BLOCK_SIZE)
        hidden = model.hidden(
            torch.from_numpy(packed.token_ids).to(device),
            torch.from_numpy(packed.positions).to(device),
            PagedAttention(packed, pool, model.config, pieces),
        )
        rows = hidden[:1].expand(max_num_seqs, -1)
        model.logits(rows).softmax(dim=-1).sort(dim=-1)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - pool.device_blocks.nbytes
    free, total = torch.cuda.mem_get_info(device)
    foreign = total - free - torch.cuda.memory_reserved(device)
    del pool
    torch.cuda.empty_cache()
    return peak + foreign + 2 * pieces.most  # decodes gather pieces, which this step did not
