"""What went wrong between here and the Hub, in one line: what was said, and what to do."""

from __future__ import annotations

import re

from hfpatch.text import printable

_LONGEST = 2000  # characters of somebody else's message
_MORE = re.compile(r"For more (information|details)[, ].*?(https?://\S+|$)", re.DOTALL)


def reason(e: BaseException) -> str:
    """An error in one line; where another one led to it, that one too.

    What the Hub answered is told by its status, its own words and what can be done about it, in
    place of huggingface_hub's lines of addresses.
    """
    chain = [e]
    while (cause := chain[-1].__cause__) is not None and len(chain) < 50:
        chain.append(cause)
    for error in chain:
        if (answered := _answered(error)) is not None:
            return answered
    said, root = f"{type(e).__name__}: {_line(e)}", chain[-1]
    if _line(root) in said:
        return said
    return f"{said} ({type(root).__name__}: {_line(root)})"


def unreached(e: BaseException) -> bool:
    """Whether an error, or one that led to it, is that the Hub gave no answer at all."""
    from huggingface_hub import errors

    # its HTTP client's, whichever that is
    client: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    chain: list[BaseException] = [e]
    while (cause := chain[-1].__cause__) is not None:
        chain.append(cause)
    if any(isinstance(error, errors.HfHubHTTPError) for error in chain):
        return False
    return any(isinstance(error, client | ConnectionError | TimeoutError) for error in chain)


def _line(e: BaseException) -> str:
    return printable(" ".join(_MORE.sub("", str(e)[:_LONGEST]).split()))


def _answered(e: BaseException) -> str | None:
    from huggingface_hub import errors

    response = getattr(e, "response", None)
    if not isinstance(e, errors.HfHubHTTPError) or response is None:
        return None
    words = printable(" ".join((e.server_message or "")[:_LONGEST].split()))
    what = f"the Hub answered {response.status_code}" + (f" ({words})" if words else "")
    advice = _advice(e, int(response.status_code), str(response.request.url))
    return f"{what}: {advice}" if advice else f"{what} at {response.request.url}"


def _advice(e: Exception, status: int, url: str) -> str:
    from huggingface_hub import errors

    token = "`hf auth login`, or HF_TOKEN"
    if isinstance(e, errors.GatedRepoError):
        return f"its owner must let you in; ask on its page, then give a token: {token}"
    if isinstance(e, errors.RepositoryNotFoundError):
        return (
            "there is no such kernel repository, or your token may not see it. Check the name; for "
            f"a private one give a token: {token}"
        )
    if isinstance(e, errors.RevisionNotFoundError):
        return "it has no such version or commit; `hfpatch inspect org/name` shows the newest"
    if isinstance(e, errors.EntryNotFoundError):
        if "/build?" in url or url.endswith("/build"):
            return "this revision has no `build` folder, so it is no published kernel"
        return f"a file that should be there is not: {url}"
    return {
        401: f"the token is missing or not accepted: {token}",
        403: f"the token may not read it: {token}",
        429: "too many requests; try again later, or with a token: " + token,
    }.get(status, "it is the Hub that failed; try again later" if status >= 500 else "")
