"""A small model inside a large one's shape: the same answers at the large one's cost."""

from headway.compress.widen.plan import Widening, plan_widening
from headway.compress.widen.shapes import SHAPES, Shape, find_shape
from headway.compress.widen.write import widen

__all__ = ["SHAPES", "Shape", "Widening", "find_shape", "plan_widening", "widen"]
