"""A user's own kernel, from a scaffold to the Kernel Hub: `hfpatch kernel new | build | check |
publish`.

`new` copies `templates/`, a project that builds as it is; the build is `hfpatch.kernel_build`;
`check` runs what the Hub demands; `publish` uploads to the version branch.
"""

from hfpatch.kernel_project.project import ProjectError

__all__ = ["ProjectError"]
