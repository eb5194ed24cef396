"""A transformers model, before and after hfpatch: same class, same numbers, fused kernels."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hfpatch

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=1000, hidden_size=256, intermediate_size=688,
    num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
)  # fmt: skip
model = LlamaForCausalLM(config).eval()  # or LlamaForCausalLM.from_pretrained(...)
tokens = torch.randint(config.vocab_size, (2, 32))

with torch.no_grad():
    before = model(tokens).logits
    print(hfpatch.apply(model))
    after = model(tokens).logits
    print(f"largest difference: {(after - before).abs().max():.1e}")

    hfpatch.restore(model)
    print("restored, bit for bit:", torch.equal(model(tokens).logits, before))
