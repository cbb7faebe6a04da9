"""The torch runner: Llama-family models over a paged KV pool, on the CPU or CUDA."""

from worker_svc.runner.torch.runner import TorchOptions, TorchRunner, load

__all__ = ["TorchOptions", "TorchRunner", "load"]
