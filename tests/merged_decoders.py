"""Two graphs of a decoder in one, as Hugging Face's exporters merge them: one that has pasts, and one for prompts that
ignores these. `use_cache_branch` says which is meant.

Lives here: the merging. Must not: know what the graphs compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from tests import models

__all__ = ["merge", "without_pasts"]


def merge(with_pasts: onnx.ModelProto, without: onnx.ModelProto, *, takes_many: bool = True) -> onnx.ModelProto:
    """Constants of one name in both are the same ones. Without `takes_many`, the graph that has pasts was traced with a
    single token, and takes only the last one."""
    first = with_pasts.graph
    nodes = first.node if takes_many else _of_last_token(first.node)
    branches = [
        helper.make_graph(branch, name, [], first.output)
        for name, branch in (("with_past", nodes), ("no_past", without.graph.node))
    ]
    names = [one.name for one in first.output]
    chosen = helper.make_node("If", ["use_cache_branch"], names, then_branch=branches[0], else_branch=branches[1])
    constants = {one.name: one for graph in (first, without.graph) for one in graph.initializer}
    switch = models.tensor("use_cache_branch", "BOOL", (1,))
    return models.model([chosen], [*first.input, switch], first.output, [*constants.values()])


def without_pasts(decoder: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph with pasts of nothing, whatever it is given."""
    changed = onnx.ModelProto()
    changed.CopyFrom(decoder)
    graph, made = changed.graph, list[onnx.NodeProto]()
    rows = helper.make_node("Shape", ["input_ids"], ["rows"], start=0, end=1)
    for one in [one for one in graph.input if one.name.startswith("past_key_values.")]:
        heads, _, size = (axis.dim_value for axis in one.type.tensor_type.shape.dim[1:])
        shape, nothing = f"shape_of_{one.name}", f"no_{one.name}"
        graph.initializer.append(numpy_helper.from_array(np.array([heads, 0, size], np.int64), shape))
        made.append(helper.make_node("Concat", ["rows", shape], [f"whole_{shape}"], axis=0))
        zero = helper.make_tensor("zero", one.type.tensor_type.elem_type, [1], [0])
        made.append(helper.make_node("ConstantOfShape", [f"whole_{shape}"], [nothing], value=zero))
        _rename(graph.node, one.name, nothing)
    nodes = [rows, *made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return changed


def _of_last_token(nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
    bounds = [
        helper.make_node("Constant", [], [f"bound_{value}"], value_ints=[value])
        for value in (-1, np.iinfo(np.int64).max)
    ]
    last = helper.make_node("Slice", ["input_ids", *(one.output[0] for one in bounds), "bound_one"], ["last_ids"])
    one = helper.make_node("Constant", [], ["bound_one"], value_ints=[1])
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    _rename(copies, "input_ids", "last_ids")
    return [*bounds, one, last, *copies]


def _rename(nodes: Sequence[onnx.NodeProto], old: str, new: str) -> None:
    for node in nodes:
        for place, name in enumerate(node.input):
            if name == old:
                node.input[place] = new
