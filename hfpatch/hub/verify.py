"""Is this what was published, locked and signed? Asked of every variant before it is imported.

A shared library runs code when it is loaded, and a damaged one takes the process down, so nothing
is imported that fails here.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from hfpatch.errors import KernelIntegrityError

_SIGNATURE = "metadata.json.sigstore"
_AGAIN = "Delete `{folder}` and download it again: `hfpatch download`"


def check_content(variant: Path) -> None:
    """Compare every file with the digest in the metadata and with the name of its blob.

    The cache names each blob by the hash that the Hub announced for it: sha256 for large files,
    git's own for small ones. The digest of the metadata also finds files that do not belong.

    Raises:
        KernelIntegrityError: a file is damaged, missing, or too much.
    """
    problems = [*_digest_problems(variant), *_blob_problems(variant)]
    if problems:
        shown = "; ".join(problems[:3]) + (f"; {len(problems) - 3} more" if problems[3:] else "")
        raise KernelIntegrityError(
            f"`{variant.name}` is not what was published: {shown}. "
            + _AGAIN.format(folder=_repo_folder(variant))
        )


def _digest_problems(variant: Path) -> list[str]:
    from kernels import Metadata
    from kernels._rust import Digest, DigestValidationError

    digest = Metadata.read_from_file(variant / "metadata.json").digest
    if digest is None:
        return []
    try:
        digest.validate(Digest.hash_variant(digest.algorithm, variant))
    except DigestValidationError as e:
        return [str(v) for v in e.violations]
    return []


def _blob_problems(variant: Path) -> list[str]:
    problems = []
    for path in sorted(variant.rglob("*")):
        if "__pycache__" in path.parts:  # of other programs; it is not read by our import
            continue
        if not path.is_symlink():
            if path.is_file() and _in_cache(variant):
                problems.append(f"`{path.relative_to(variant)}` was put there by somebody else")
            continue
        name = path.resolve().name
        data = path.read_bytes()
        if re.fullmatch(r"[0-9a-f]{64}", name):
            got = hashlib.sha256(data).hexdigest()
        elif re.fullmatch(r"[0-9a-f]{40}", name):
            got = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        else:
            continue
        if got != name:
            problems.append(
                f"`{path.relative_to(variant)}` is damaged: its hash is {got}, the Hub said {name}"
            )
    return problems


def _in_cache(variant: Path) -> bool:
    """Whether the files here are links into the cache's store, as they are where links work."""
    return (variant / "metadata.json").is_symlink()


def _repo_folder(variant: Path) -> Path:
    snapshots = [p for p in variant.parents if p.name == "snapshots"]
    return snapshots[0].parent if snapshots else variant


def lock_hash(metadata: bytes) -> str:
    """What a lock file records of a variant: the sha256 of its metadata.json, in hexadecimal.

    The metadata hold the digests of all other files, so this stands for the whole variant.
    """
    return hashlib.sha256(metadata).hexdigest()


def check_lock(variant: Path, locked: dict[str, str], lockfile: Path) -> None:
    """Compare a variant with the lock file.

    Raises:
        KernelIntegrityError: the variant is not in it, or is another one than was locked.
    """
    got = lock_hash((variant / "metadata.json").read_bytes())
    expected = locked.get(variant.name)
    if expected is None:
        raise KernelIntegrityError(
            f"`{variant.name}` is not in `{lockfile}`, which lists "
            f"{', '.join(sorted(locked)) or 'no variant'}. Lock it again: `hfpatch lock`"
        )
    if got != expected:
        raise KernelIntegrityError(
            f"`{variant.name}` is not the locked one: sha256 of its metadata is {got}, expected "
            f"{expected} (`{lockfile}`). If the new one is right, lock it again: `hfpatch lock`"
        )


def check_signature(variant: Path, verifier: Any = None) -> None:
    """Check the Sigstore signature of the metadata against the publishers that `kernels` knows.

    The roots of trust are those that came with `sigstore`, so this needs no network. The digests
    that the signed metadata hold are checked by `check_content`.

    Args:
        variant: the variant's folder.
        verifier: a `sigstore.verify.Verifier`; default: the production one, offline.

    Raises:
        KernelIntegrityError: there is no signature, it is malformed, it is of something else, by
            somebody else, or of metadata without a digest.
    """
    from kernels import Metadata
    from kernels.verify import DEFAULT_POLICIES
    from sigstore.errors import VerificationError
    from sigstore.models import Bundle, InvalidBundle
    from sigstore.verify import Verifier, policy

    why = "`require_signed` refuses it"
    try:
        bundle = Bundle.from_json((variant / _SIGNATURE).read_bytes())
    except FileNotFoundError as e:
        raise KernelIntegrityError(f"`{variant.name}` is not signed; {why}") from e
    except (InvalidBundle, ValueError) as e:
        first = str(e).splitlines()[0]
        raise KernelIntegrityError(
            f"the signature of `{variant.name}` is malformed ({first}); {why}"
        ) from e
    metadata = (variant / "metadata.json").read_bytes()
    verifier = verifier or Verifier.production(offline=True)
    try:
        verifier.verify_artifact(metadata, bundle, policy.AnyOf(DEFAULT_POLICIES))
    except VerificationError as e:
        raise KernelIntegrityError(
            f"the signature of `{variant.name}` is not valid: {e}; {why}"
        ) from e
    if Metadata.from_bytes(metadata).digest is None:
        raise KernelIntegrityError(
            f"the signed metadata of `{variant.name}` hold no digest of its files; {why}"
        )
