"""Frames to mp4 files, and a picture that shows how far two videos are apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

PANEL_WIDTH = 384  # smaller frames are enlarged to about this
CAPTION_HEIGHT = 28
GAP = 4


@dataclass(frozen=True)
class PixelDifference:
    """Between two videos of equal shape, in 8-bit levels (0..255)."""

    max_pixel_difference: int
    mean_pixel_difference: float


def to_pixels(frames: np.ndarray) -> np.ndarray:
    """Floats in 0..1 as uint8 in 0..255, of the same shape."""
    return np.rint(np.clip(frames, 0, 1) * 255).astype(np.uint8)


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


def save_comparison(original: np.ndarray, patched: np.ndarray, output: Path) -> Path:
    """A PNG of one frame: original | patched | difference, amplified to full brightness.

    The frame is the one where the two videos [batch, frames, height, width, 3] differ most.
    """
    difference = _absolute_difference(original, patched)
    per_frame = difference.max(axis=(2, 3, 4))
    video, frame = np.unravel_index(per_frame.argmax(), per_frame.shape)
    largest = int(per_frame.max())
    gain = 255 // largest if largest else 1
    panels = {
        "original": original[video, frame],
        f"patched (frame {frame})": patched[video, frame],
        f"difference x {gain}, largest {largest}/255" if largest else "difference: none": (
            difference[video, frame] * gain
        ).astype(np.uint8),
    }
    height, width = original.shape[2:4]
    zoom = max(1, round(PANEL_WIDTH / width))
    step = width * zoom + GAP
    picture = Image.new("RGB", (3 * step - GAP, height * zoom + CAPTION_HEIGHT), "black")
    draw = ImageDraw.Draw(picture)
    font = ImageFont.load_default(size=16)
    for i, (caption, pixels) in enumerate(panels.items()):
        panel = Image.fromarray(pixels).resize((width * zoom, height * zoom), Image.NEAREST)
        picture.paste(panel, (i * step, CAPTION_HEIGHT))
        draw.text((i * step + 6, 5), caption, fill="white", font=font)
    output.parent.mkdir(parents=True, exist_ok=True)
    picture.save(output)
    return output
