"""Llama: the block that the other families differ from."""

from worker_svc.runner.torch.families.family import Family

LLAMA = Family(architecture="LlamaForCausalLM", gguf="llama", gguf_pairs_adjacent=True)
