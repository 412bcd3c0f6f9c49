"""Formulas as MathML, which browsers draw themselves: pages need no script, and no network to be read."""

import re

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.logging import getLogger

# TeX that the converter has under another name.
_SAME = {r"\big": r"\bigl", r"\Big": r"\Bigl", r"\dots": r"\ldots"}

# A hat with an index, which would be set below the letter instead of beside it.
_HAT = re.compile(r"\\widehat\s*(\{(?:[^{}]|\{[^{}]*\})*\}|[A-Za-z])(?=\s*[_^])")


def mathml(tex, *, block):
    """The MathML of a formula; TeX that cannot be converted raises an error."""
    tex = re.sub(r"\\(big|Big|dots)(?![A-Za-z])", lambda found: _SAME[found[0]], tex)
    tex = _HAT.sub(r"{{}\g<0>}", tex)
    if tex.startswith(("_", "^")):  # an index with nothing before it, as in CO$_2$
        tex = "{}" + tex
    return tex2mathml(tex, as_block=block).replace('accent="false"', 'accent="true"')


def _visit(block):
    def visit(translator, node):
        try:
            formula = mathml(node.astext(), block=block)
        except Exception as error:  # the converter's errors have no class of their own; in a strict build this fails it
            getLogger(__name__).warning("formula %r: %s", node.astext(), error, location=node)
            formula = node.astext()
        translator.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise SkipNode

    return visit


def setup(app):
    app.add_html_math_renderer("mathml", (_visit(block=False), None), (_visit(block=True), None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
