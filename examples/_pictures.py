"""Frames to mp4 files, and a picture that shows how far two videos are apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

PANEL_WIDTH = 384  # smaller frames are enlarged to about this
CAPTION_HEIGHT = 28
GAP = 4


@dataclass(frozen=True)
class PixelDifference:
    """Between two videos of equal shape, in 8-bit levels (0..255)."""

    max_pixel_difference: int
    mean_pixel_difference: float


def to_pixels(frames: torch.Tensor) -> np.ndarray:
    """Floats in 0..1, [..., 3, height, width], as uint8 in 0..255, [..., height, width, 3].

    Rounded on the frames' device: a quarter of the bytes of fp32 then go to the host.
    """
    levels = frames.float().clamp(0, 1).mul_(255).round_().to(torch.uint8)
    pixels = levels.movedim(-3, -1).contiguous()
    return (_to_host(pixels) if pixels.is_cuda else pixels).numpy()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy through page-locked memory, which the GPU writes many times faster.

    The result is in ordinary memory: it may be kept for long, while PyTorch gives the page-locked
    memory, which takes long to make, to the next call.
    """
    locked = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    locked.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return locked.clone()


def _absolute_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.abs(a.astype(np.int16) - b.astype(np.int16))


def pixel_difference(a: np.ndarray, b: np.ndarray) -> PixelDifference:
    difference = _absolute_difference(a, b)
    return PixelDifference(int(difference.max()), float(difference.mean()))


def save_videos(videos: np.ndarray, output: Path, fps: int) -> list[Path]:
    """Writes uint8 videos [batch, frames, height, width, 3] as mp4 (H.264).

    One video goes to `output`; of several, the second to `<stem>_1.mp4` and so on.
    """
    import imageio.v2 as imageio

    output.parent.mkdir(parents=True, exist_ok=True)
    files = []
    for i, video in enumerate(videos):
        file = output if i == 0 else output.with_stem(f"{output.stem}_{i}")
        with imageio.get_writer(file, fps=fps, quality=8) as writer:
            for frame in video:
                writer.append_data(frame)
        files.append(file)
    return files


def save_differences(original: np.ndarray, others: dict[str, np.ndarray], output: Path) -> Path:
    """A PNG of one frame, a row for each of `others`: original | other | difference, amplified.

    All rows show the same frame, the one where any of the videos [batch, frames, height, width, 3]
    differs most from the original, and amplify alike: the largest difference is at full brightness.
    """
    differences = {name: _absolute_difference(original, other) for name, other in others.items()}
    per_frame = np.max([d.max(axis=(2, 3, 4)) for d in differences.values()], axis=0)
    video, frame = np.unravel_index(per_frame.argmax(), per_frame.shape)
    largest = int(per_frame.max())
    gain = 255 // largest if largest else 1
    height, width = original.shape[2:4]
    zoom = max(1, round(PANEL_WIDTH / width))
    size = (width * zoom, height * zoom)
    row_height = size[1] + CAPTION_HEIGHT
    picture = Image.new(
        "RGB", (3 * (size[0] + GAP) - GAP, len(others) * (row_height + GAP) - GAP), "black"
    )
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=16)
    for row, (name, other) in enumerate(others.items()):
        difference = differences[name][video, frame]
        worst = int(difference.max())
        panels = {
            "eager": original[video, frame],
            f"{name} (frame {frame})": other[video, frame],
            f"difference x {gain}, largest {worst}/255" if worst else "difference: none": (
                difference * gain
            ).astype(np.uint8),
        }
        top = row * (row_height + GAP)
        for i, (caption, pixels) in enumerate(panels.items()):
            left = i * (size[0] + GAP)
            panel = Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST)
            picture.paste(panel, (left, top + CAPTION_HEIGHT))
            draw.text((left + 6, top + 5), caption, fill="white", font=font)
    output.parent.mkdir(parents=True, exist_ok=True)
    picture.save(output)
    return output
