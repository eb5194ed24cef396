"""Why a step of the lab does not go on. The exit status says which kind it is."""

from __future__ import annotations

from hfpatch.errors import HfpatchError


class Refused(HfpatchError):
    """A step before this one is missing or no longer holds; nothing was done. Exit status 3."""

    status = 3


class ToolMissing(HfpatchError):
    """This machine lacks what the step needs; the message says how to get it. Exit status 4."""

    status = 4
