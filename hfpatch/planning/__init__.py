"""From a model to its plan: which modules, with which settings, for which machine."""
