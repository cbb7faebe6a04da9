"""Mistral: Llama with a sliding window."""

from functools import partial

from worker_svc.runner.torch.families.family import Family, same_window

MISTRAL = Family(
    architecture="MistralForCausalLM",
    gguf=None,  # its files say llama
    sliding_window=partial(same_window, default=4096),
)
