"""A built-in tool for arithmetic, used by the quickstart's agent and available to any environment.

`environment=tools environment.args.functions=[asyncrl.environments.tools.calculator:calculate]`
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from typing import Any

LONGEST = 200
"""Limit on the characters of an expression: without powers, all its numbers stay short."""
TWO: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
ONE: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> float:
    """Work out an arithmetic expression.

    Args:
        expression: Numbers, + - * / // % and brackets.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"at most {LONGEST} letters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"{expression!r} is no arithmetic") from error
    return _value(tree.body)


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.BinOp) and type(node.op) in TWO:
        return TWO[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in ONE:
        return ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    raise ValueError("only numbers, + - * / // % and brackets")
