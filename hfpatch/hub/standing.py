"""What `hfpatch inspect` says of who published a kernel: trusted by the Hub, and signed by them?

It is told, not enforced; `hfpatch.hub.trust` and `hfpatch.hub.verify` decide what may run.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpatch.errors import KernelIntegrityError
from hfpatch.hub.evidence import Evidence
from hfpatch.hub.explain import reason
from hfpatch.hub.fetch import LARGEST_METADATA, METADATA, SIGNATURE, Listed
from hfpatch.hub.spec import HubSpec
from hfpatch.hub.verify import check_signature_of

if TYPE_CHECKING:
    from huggingface_hub import HfApi


@dataclass(frozen=True)
class Finding:
    """An answer, and the words for it; `answer` is None where nobody could say."""

    answer: bool | None
    words: str


NOT_PUBLISHED = Finding(None, "a local folder, which nobody vouches for")


def publisher(api: HfApi, spec: HubSpec) -> Finding:
    """Whether the Hub marks the publisher as trusted, as it says now."""
    name = spec.publisher
    try:
        found: Any = api.get_organization_overview(name)
    except Exception as e:
        return Finding(None, f"the Hub does not say whether `{name}` is trusted ({reason(e)})")
    trusted = getattr(found, "trustedKernelPublisher", False) is True
    if trusted and getattr(found, "name", None) == name:
        return Finding(True, f"`{name}` is trusted by the Hub")
    return Finding(
        False,
        f"`{name}` is not trusted by the Hub; to load it: `--trust-kernel {spec.repo}`, or "
        f"`hub={{'trust_remote_code': ['{spec.repo}']}}`",
    )


def publisher_as_told(spec: HubSpec) -> Finding:
    """The same without a network: what the Hub said when it was last asked here."""
    asked = Evidence.read(spec.repo).publisher
    if not asked:
        return Finding(None, f"whether `{spec.publisher}` is trusted was never asked here")
    day = time.strftime("%Y-%m-%d", time.gmtime(asked))
    return Finding(True, f"`{spec.publisher}` was trusted by the Hub on {day}")


def signature(variant: Path, files: Collection[str], spec: HubSpec) -> Finding:
    """Whether a variant is signed by its publisher.

    The signature is of the metadata, which hold the digests of the other files; these are compared
    when the kernel is loaded.

    Args:
        variant: its folder, with the metadata and, if it has one, the signature.
        files: what the variant has.
        spec: what was asked for.
    """
    if SIGNATURE not in files:
        return Finding(False, "not signed")
    limit = Listed(LARGEST_METADATA, "")
    try:
        check_signature_of(variant, {METADATA: limit, SIGNATURE: limit}, spec)
    except KernelIntegrityError as e:
        return Finding(False, f"not valid: {e}".removesuffix("; `require_signed` refuses it"))
    return Finding(True, f"signed by `{spec.publisher}`")
