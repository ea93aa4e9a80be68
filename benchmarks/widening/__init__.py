"""A small model inside a large one's shape: the same answers at the large one's cost."""

from widening.plan import Widening, plan_widening
from widening.shapes import SHAPES, Shape, find_shape
from widening.write import widen

__all__ = ["SHAPES", "Shape", "Widening", "find_shape", "plan_widening", "widen"]
