"""A diffusers model, before and after hfpatch; a pipeline is patched in the same way."""

import torch
from diffusers import LTXVideoTransformer3DModel

import hfpatch

torch.manual_seed(0)
model = LTXVideoTransformer3DModel(
    num_layers=4, num_attention_heads=8, cross_attention_dim=512, caption_channels=256
).eval()  # or LTXPipeline.from_pretrained("Lightricks/LTX-Video")
inputs = {
    "hidden_states": torch.randn(1, 2 * 4 * 6, 128),  # 2 x 4 x 6 patches of video
    "encoder_hidden_states": torch.randn(1, 16, 256),  # 16 tokens of text
    "encoder_attention_mask": torch.ones(1, 16),
    "timestep": torch.tensor([500]),
    "num_frames": 2, "height": 4, "width": 6,
}  # fmt: skip

with torch.no_grad():
    before = model(**inputs).sample
    print(hfpatch.apply(model))
    after = model(**inputs).sample
    print(f"largest difference: {(after - before).abs().max():.1e}")

    hfpatch.restore(model)
    print("restored, bit for bit:", torch.equal(model(**inputs).sample, before))
