"""A calculator that is safe to hand to a language model: whole and decimal numbers, + - * and parentheses.

Invariant: the work of one call is bounded by the length of its text, and any text either has one value or raises
``CannotCompute``; nothing is ever evaluated as code.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from decimal import Context, Decimal, localcontext

LONGEST = 200
"""Characters of an expression."""

_DIGITS = frozenset("0123456789.")

_EXACT = Context(prec=2 * LONGEST)
"""Digits of the longest product; no exponents are read, so nothing can need more."""

_BINARY: dict[type[ast.operator], Callable[[Decimal, Decimal], Decimal]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class CannotCompute(ValueError):
    """A text that is no expression of this calculator; says why in a few words."""


def compute(text: str) -> str:
    """The value of an expression, in plain digits. Raises ``CannotCompute``."""
    expression = text.strip().removesuffix("=").strip()
    if len(expression) > LONGEST:
        raise CannotCompute(f"longer than {LONGEST} characters")
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise CannotCompute("not a sum") from None
    with localcontext(_EXACT):
        return f"{_value(tree.body, expression):f}"


def _value(node: ast.expr, text: str) -> Decimal:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        digits = ast.get_source_segment(text, node) or ""
        if not set(digits) <= _DIGITS:
            raise CannotCompute("only plain decimal numbers")
        return Decimal(digits)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, text)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left, text), _value(node.right, text))
    raise CannotCompute("only numbers, +, -, * and parentheses")
