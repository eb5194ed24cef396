"""Modes of the process that a block's code enters: left out where they change nothing."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from hfpatch.regions.nodes import is_tensor, value

_ENTER, _EXIT = torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast


def without_modes(graph: Graph) -> None:
    """Drop gradients turned off, since fused calls record nothing, and autocast turned off: calls
    under autocast of the device that they are on go to the original, so it is off already there.

    Of other devices that is unknown: where a tensor of the graph lies on such a one, its autocast
    stays in the graph, as does one that is turned on. What stays is refused.
    """
    devices = {value(n).device.type for n in graph.nodes if is_tensor(n)}
    given = [value(n).device.type for n in graph.nodes if n.op == "placeholder"]
    elsewhere = devices - set(given[:1])
    for node in reversed(graph.nodes):  # what ends a mode reads the node that began it
        is_no_gradient = node.target is torch._C._set_grad_enabled and node.args == (False,)
        began = node.args[0] if node.target is _EXIT else node
        if is_no_gradient or (_turns_off(began) and began.args[0] not in elsewhere):
            graph.erase_node(node)


def _turns_off(node: object) -> bool:
    """Whether a node enters autocast that is off."""
    return isinstance(node, Node) and node.target is _ENTER and node.args[2] is False
