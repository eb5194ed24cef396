"""Leaves: single modules, such as norms, activations and gated MLPs; one file each kind."""
