"""The shapes that are measured, by kind of op and device. Those of models say whose they are."""

from __future__ import annotations

Shape = dict[str, int]


def _shapes(names: str, *sizes: tuple[int, ...]) -> tuple[Shape, ...]:
    keys = names.split()
    return tuple(dict(zip(keys, size, strict=True)) for size in sizes)


# Every hidden size at the rows of a prefill, and every number of rows at a usual hidden size.
_HIDDEN = (64, 256, 512, 1000, 1024, 2048, 4096, 5120, 7168, 8192, 12288, 16384)
_ROWS = (1, 16, 256, 1024, 16384, 65536)
_NORM_BASE = (
    (1, 1024, 2048),
    (4, 1024, 2048),
    (2, 4096, 3072),
    (4, 4096, 3072),  # the reference recipe's
    (1, 8064, 2048),  # LTX-Video, 161 frames
    (1, 4096, 8192),
    (1, 16384, 128),  # per-head norms
    (1, 32768, 64),
    (8, 1, 4096),  # decoding
)
_NORM_FEW = ((4, 1024, 2048), (2, 4096, 3072), (1, 4096, 8192), (1, 16384, 128), (8, 1, 4096))

GPU: dict[str, tuple[Shape, ...]] = {
    "norm": _shapes(
        "B S D",
        *_NORM_BASE,
        *((1, 4096, d) for d in _HIDDEN if d != 8192),
        *((1, s, 4096) for s in _ROWS),
        (1, 65536, 2048),
    ),
    "norm few": _shapes(
        "B S D",
        *_NORM_FEW,
        *((1, 4096, d) for d in (1000, 4096, 5120, 16384)),
        *((1, s, 4096) for s in (1, 65536)),
    ),
    "norm dtypes": _shapes("B S D", (4, 1024, 2048), (1, 4096, 8192), (8, 1, 4096)),
    "norm grad": _shapes("B S D", *_NORM_FEW, (1, 4096, 1000), (1, 4096, 4096), (1, 4096, 16384)),
    "adaln": _shapes(
        "B S D",
        (2, 2688, 2048),  # LTX-Video, 49 frames
        (2, 8064, 2048),  # LTX-Video, 161 frames
        (1, 4608, 3072),  # Flux, 1024 px and text
        (1, 512, 1536),
    ),
    "wide": _shapes(
        "R D",
        (1, 14336),  # Llama-8B, decoding
        (2048, 8192),  # LTX-Video's MLP
        (5376, 8192),
        (4608, 12288),  # Flux's MLP
        (4096, 14336),  # Llama-8B's MLP
        (4096, 1000),
    ),
    "wide grad": _shapes("R D", (2048, 8192), (4096, 14336), (4096, 1000)),
    "packed": _shapes("R D", (8192, 2560), (2048, 5120), (4096, 17920)),  # SDXL, SDXL, Phi-3
    "packed grad": _shapes("R D", (8192, 2560), (4096, 17920)),
    "heads": _shapes(
        "B S H K D",
        (1, 2048, 32, 8, 128),  # Llama-8B, prefill
        (8, 1, 32, 8, 128),  # Llama-8B, decoding
        (1, 4608, 24, 24, 128),  # Flux
        (1, 4096, 16, 8, 64),
    ),
    "joint heads": _shapes("B S H D", (1, 4608, 24, 128), (1, 32760, 12, 128), (2, 2688, 32, 64)),
    "gated norm": _shapes("B S D", (1, 4096, 8192), (1, 32768, 128), (8, 1, 8192)),
    "logits": _shapes("R V", (1, 128256), (2048, 128256), (8192, 32000), (4096, 151936)),
    "logits grad": _shapes("R V", (2048, 128256), (8192, 32000)),
    "routers": _shapes("T E", (65536, 8), (65536, 64), (16384, 256)),  # 32 layers of 2048 tokens
    "images": _shapes(
        "N C S",
        (2, 320, 16384),  # SDXL's UNet at 1024 px
        (2, 640, 4096),
        (2, 1280, 1024),
        (1, 512, 16384),  # a VAE's decoder
        (1, 128, 1048576),
    ),
    "images last": _shapes(
        "N S C",
        (2, 16384, 320),  # the same in torch.channels_last
        (2, 4096, 640),
        (2, 1024, 1280),
        (1, 16384, 512),
        (1, 1048576, 128),
    ),
    "videos": _shapes("R D", (1204224, 128), (153600, 256), (22080, 512)),  # LTX-Video's decoder
    "parameters": _shapes("P N", (32, 4194304), (256, 4096)),
}

# Model shapes at the lengths that two cores are given.
CPU: dict[str, tuple[Shape, ...]] = {
    "norm": _shapes("B S D", (1, 512, 2048), (1, 128, 4096), (1, 1, 4096), (1, 4096, 64)),
    "norm few": _shapes("B S D", (1, 512, 768), (1, 512, 2048), (1, 1, 4096)),
    "norm dtypes": (),
    "norm grad": _shapes("B S D", (1, 512, 768), (1, 512, 2048)),
    "adaln": _shapes("B S D", (1, 512, 2048), (1, 512, 3072)),
    "wide": _shapes("R D", (128, 8192), (512, 8192), (1, 14336)),
    "wide grad": _shapes("R D", (128, 8192), (512, 8192)),
    "packed": _shapes("R D", (1024, 2560), (128, 8192)),
    "packed grad": _shapes("R D", (1024, 2560)),
    "heads": _shapes("B S H K D", (1, 256, 32, 8, 128), (1, 1, 32, 8, 128), (1, 512, 16, 8, 64)),
    "joint heads": _shapes("B S H D", (1, 512, 24, 128), (1, 512, 32, 64)),
    "gated norm": _shapes("B S D", (1, 512, 2048), (1, 4096, 128)),
    "logits": _shapes("R V", (1, 128256), (64, 32000), (32, 128256)),
    "logits grad": _shapes("R V", (64, 32000)),
    "routers": _shapes("T E", (4096, 8), (4096, 64)),
    "images": _shapes("N C S", (1, 320, 1024), (1, 128, 16384)),
    "images last": _shapes("N S C", (1, 1024, 320), (1, 16384, 128)),
    "videos": _shapes("R D", (8192, 128), (2048, 512)),
    "parameters": _shapes("P N", (8, 1048576), (64, 4096)),
}


def shapes_of(kind: str, device: str) -> tuple[Shape, ...]:
    return (CPU if device == "cpu" else GPU)[kind]
