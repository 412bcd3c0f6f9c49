"""Formulas as MathML, which browsers draw themselves: pages need no script, and no network to be read."""

import re

from docutils.utils.math.latex2mathml import tex2mathml

_SAME = {
    r"\big": r"\bigl",
    r"\Big": r"\Bigl",
    r"\dots": r"\ldots",
}  # TeX that the converter has under another name

_HAT = re.compile(
    r"\\widehat\s*(\{(?:[^{}]|\{[^{}]*\})*\}|[A-Za-z])(?=\s*[_^])"
)  # else its index lands below the letter


def mathml(tex, *, block):
    """The MathML of a formula; TeX that cannot be converted is an error, not a blank."""
    tex = re.sub(r"\\(big|Big|dots)(?![A-Za-z])", lambda found: _SAME[found[0]], tex)
    tex = _HAT.sub(r"{{}\g<0>}", tex)
    if tex.startswith(("_", "^")):  # an index with nothing before it, as in CO$_2$
        tex = "{}" + tex
    return tex2mathml(tex, as_block=block).replace('accent="false"', 'accent="true"')


def _write(translator, node, *, block):
    tex = node.astext()
    try:
        formula = mathml(tex, block=block)
    except Exception as error:
        import sphinx.util.logging

        sphinx.util.logging.getLogger(__name__).warning(
            "formula %r: %s", tex, error, location=node
        )
        formula = ""
    translator.body.append(f'<div class="math">{formula}</div>' if block else formula)


def _visit_inline(translator, node):
    import docutils.nodes

    _write(translator, node, block=False)
    raise docutils.nodes.SkipNode


def _visit_block(translator, node):
    import docutils.nodes

    _write(translator, node, block=True)
    raise docutils.nodes.SkipNode


def setup(app):
    app.add_html_math_renderer("mathml", (_visit_inline, None), (_visit_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
