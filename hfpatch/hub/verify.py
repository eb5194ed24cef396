"""Is this what was locked and signed? Asked of every variant before it is imported.

Whether it is what was published is asked as it is read: `hfpatch.hub.sealed`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hfpatch.errors import KernelIntegrityError
from hfpatch.files import read_regular, strict_json
from hfpatch.hub.fetch import LARGEST_METADATA, METADATA, SIGNATURE, Listed
from hfpatch.hub.sealed import Sealed
from hfpatch.hub.spec import HubSpec

_WHY = "`require_signed` refuses it"


def lock_hash(metadata: bytes) -> str:
    """What a lock file records of a variant: the sha256 of its metadata.json, in hexadecimal.

    The metadata hold the digests of all other files, so this stands for the whole variant.
    """
    return hashlib.sha256(metadata).hexdigest()


def check_lock(sealed: Sealed, locked: Mapping[str, str], lockfile: Path) -> None:
    """Compare a variant with the lock file.

    Raises:
        KernelIntegrityError: the variant is not in it, or is another one than was locked, or its
            metadata hold no digest, so that the lock would not cover its files.
    """
    name = sealed.variant
    got = lock_hash(sealed.kept[METADATA])
    expected = locked.get(name)
    if expected is None:
        raise KernelIntegrityError(
            f"`{name}` is not in `{lockfile}`, which lists "
            f"{', '.join(sorted(locked)) or 'no variant'}. Lock it again: `hfpatch lock`"
        )
    if got != expected:
        raise KernelIntegrityError(
            f"`{name}` is not the locked one: sha256 of its metadata is {got}, expected "
            f"{expected} (`{lockfile}`). If the new one is right, lock it again: `hfpatch lock`"
        )
    if sealed.metadata.digest is None:
        raise KernelIntegrityError(
            f"the metadata of `{name}` hold no digest of its files, so `{lockfile}` says nothing "
            "of these"
        )


def check_signature(sealed: Sealed, spec: HubSpec, verifier: Any = None) -> None:
    """Check the Sigstore signature of the metadata against the publishers that `kernels` knows.

    The roots of trust are those that came with `sigstore`, so this needs no network. The digests
    that the signed metadata hold were compared with the files when these were read.

    Args:
        sealed: the variant.
        spec: what was asked for; a signature of another kernel or version does not count.
        verifier: a `sigstore.verify.Verifier`; default: the production one, offline.

    Raises:
        KernelIntegrityError: there is no signature, it is malformed, it is of something else, by
            somebody else, or of metadata without a digest.
    """
    metadata, signature = sealed.kept[METADATA], sealed.kept.get(SIGNATURE)
    if signature is None:
        raise KernelIntegrityError(f"`{sealed.variant}` is not signed; {_WHY}")
    _check(sealed.variant, metadata, signature, spec, verifier)


def check_signature_of(
    variant: Path, expected: Mapping[str, Listed], spec: HubSpec, verifier: Any = None
) -> None:
    """`check_signature` of a variant of which only the metadata and their signature are here."""
    if SIGNATURE not in expected:
        raise KernelIntegrityError(f"`{variant.name}` is not signed")
    try:
        metadata, signature = (
            read_regular(variant / name, min(LARGEST_METADATA, expected[name].size))
            for name in (METADATA, SIGNATURE)
        )
    except OSError as e:
        raise KernelIntegrityError(f"`{variant.name}` cannot be read: {e}") from e
    _check(variant.name, metadata, signature, spec, verifier)


def _check(variant: str, metadata: bytes, signature: bytes, spec: HubSpec, verifier: Any) -> None:
    from kernels import Metadata
    from kernels.verify import DEFAULT_POLICIES
    from sigstore.errors import VerificationError
    from sigstore.models import Bundle, InvalidBundle
    from sigstore.verify import Verifier, policy

    try:
        bundle = Bundle.from_json(signature)
    except (InvalidBundle, ValueError, TypeError, AttributeError, RecursionError) as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise KernelIntegrityError(
            f"the signature of `{variant}` is malformed ({first}); {_WHY}"
        ) from e
    # of the repository's own publisher: another's signature says nothing of this one
    ours = [p for p in DEFAULT_POLICIES if _organization(p) == spec.publisher]
    if not ours:
        raise KernelIntegrityError(
            f"`{variant}`: `kernels` knows nobody who signs for `{spec.publisher}`, so its "
            f"signature is not valid; {_WHY}"
        )
    verifier = verifier or Verifier.production(offline=True)
    try:
        verifier.verify_artifact(metadata, bundle, policy.AnyOf(ours))
    except VerificationError as e:
        raise KernelIntegrityError(f"the signature of `{variant}` is not valid: {e}; {_WHY}") from e
    try:
        strict_json(metadata)
        found = Metadata.from_bytes(metadata)
    except ValueError as e:
        raise KernelIntegrityError(f"the signed metadata of `{variant}` are none: {e}") from e
    if found.digest is None:
        raise KernelIntegrityError(
            f"the signed metadata of `{variant}` hold no digest of its files; {_WHY}"
        )
    _check_subject(variant, str(found.name), found.version, spec)


def _check_subject(variant: str, name: str, version: int | None, spec: HubSpec) -> None:
    """Raises where the signed metadata are another kernel's, or another version's."""
    repository = spec.repo.split("/")[1].replace("_", "-").lower()
    if name != repository:
        raise KernelIntegrityError(
            f"the signature of `{variant}` is one of the kernel `{name}`, not of `{spec.repo}`; "
            f"{_WHY}"
        )
    if spec.version is not None and version != spec.version:
        raise KernelIntegrityError(
            f"the signature of `{variant}` is one of version {version}, not of `{spec}`; {_WHY}"
        )


def _organization(policy: Any) -> str:
    """The publisher on the Hub whose repositories a policy of `kernels` is for: it signs from a
    repository on GitHub of that name."""
    return str(getattr(policy, "repo_id", "")).rpartition("/")[2]
